"""The leaderboard: one row per model or baseline, ordered by the validation metric that selects the champion."""

from __future__ import annotations

import csv
import io
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from seqrec.artifacts import CASES, METRICS, REPORT_PAGE, read_json, read_table, write_json, write_text
from seqrec.evaluation import intervals
from seqrec.evaluation.metrics import SELECTION, TEST
from seqrec.pipeline import BASELINES

LEADERBOARD = "leaderboard.json"
REQUIRED = (
    SELECTION,
    TEST,
    "test/ndcg@10/low",
    "test/ndcg@10/high",
    "test/recall@10",
    "test/mrr",
    "test/coverage@10",
    "parameters",
    "train_seconds",
)
SUMMARY = (SELECTION, TEST, "test/mrr", "test/coverage@10")  # what DVC shows in 100 columns
HEADINGS = (  # two short lines each, so that the table fits into 80 columns
    "valid\nNDCG",
    "test NDCG@10\n[95 % interval]",
    "test\nRecall",
    "test\nMRR",
    "cover-\nage",
    "para-\nmeters",
    "train\ns",
)
REGISTERED = ("", "make ui            compare the runs in MLflow, at http://127.0.0.1:5000")
UNDER_DVC = ("dvc params diff    show which settings differ from the last commit; dvc metrics diff, which figures",)
Row = dict[str, Any]  # model: str; baseline, candidate, champion, refit: bool; and the numbers of REQUIRED


def build(*, reports: Path, models: Sequence[str]) -> list[Row]:
    """Return the rows of `models` and of the evaluated baselines, ordered by validation metric.

    Raises:
        FileNotFoundError: a model has no `reports/<model>/metrics.json`.
        ValueError: a metrics file lacks a value of `REQUIRED`.
    """
    evaluated = [name for name in BASELINES if (reports / name / METRICS).is_file()]
    rows = [_row(reports, name, baseline=name in evaluated) for name in (*models, *evaluated)]
    return sorted(rows, key=lambda row: (-row[SELECTION], row["model"]))


def _row(reports: Path, name: str, *, baseline: bool) -> Row:
    path = reports / name / METRICS
    if not path.is_file():
        raise FileNotFoundError(
            f"leaderboard: {path} not found; evaluate {name} first, or remove it from `leaderboard`"
        )
    metrics = read_json(path)
    missing = [key for key in REQUIRED if key not in metrics]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; evaluate {name} again")
    flags = {"baseline": baseline, "candidate": False, "champion": False, "refit": bool(metrics.get("refit"))}
    return {"model": name, **flags, **{key: metrics[key] for key in REQUIRED}}


def best_baseline(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row of the best baseline on validation, or None without baselines."""
    return max((row for row in rows if row["baseline"]), key=lambda row: row[SELECTION], default=None)


def below_baseline(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the models whose validation metric is below that of the best baseline."""
    best = best_baseline(rows)
    return [row["model"] for row in rows if best and not row["baseline"] and row[SELECTION] < best[SELECTION]]


def verdict(reports: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the model that is best on validation, its paired gains over the best baseline, and sentences about them.

    `reports` holds the cases of every row.
    """
    best, baseline = next((row for row in rows if not row["baseline"]), None), best_baseline(rows)
    model = best and best["model"]
    found = {"model": model, "baseline": baseline and baseline["model"], "gain": None, "test_gain": None}
    if best is None:
        return found | {"sentence": "This run has no trained model to compare with the baselines."}
    if baseline is None:
        return found | {"sentence": f"{model} is the best model."}
    ours, theirs = (read_table(reports / row["model"] / CASES) for row in (best, baseline))
    gain, test = (intervals.paired_gain(ours, theirs, split=split, seed=42) for split in ("valid", "test"))
    against = f"the best baseline, {baseline['model']}, by {gain} NDCG@10 on validation"
    sentence = (
        f"{model} is reliably better than the baselines. It beats {against}."
        if gain.low > 0
        else f"No trained model is reliably better than the baselines. {model}, the best, differs from {against}."
    )
    sentence += f" On test, the difference is {test}."
    return found | {"gain": gain._asdict(), "test_gain": test._asdict(), "sentence": sentence}


def write(reports: Path, sequences: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Write leaderboard.json with the verdict and the warnings about the data; return its content."""
    from seqrec.data import data_warnings  # takes seconds
    from seqrec.data.sequences import load

    data = load(sequences)
    split, filter_seen = data.card, bool(read_json(reports / rows[0]["model"] / METRICS)["filter_seen"])
    board = {key: split[key] for key in ("dataset", "protocol", "split_sha256")} | {
        "selection": SELECTION,
        "rows": list(rows),
        "verdict": verdict(reports, rows),
        "warnings": data_warnings.of(data, filter_seen=filter_seen),
        "registry": None,  # `register` writes the gate's decision here
    }
    write_json(reports / LEADERBOARD, board)
    return board


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the values of `rows` as CSV, for the plots of DVC."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["model", *REQUIRED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_curves(path: Path, histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write `SELECTION` by epoch (1, 2, ... over all phases) as CSV, one row per point.

    Epochs without validation have no row, because DVC would draw an empty cell as 0.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "epoch", SELECTION])
    for name, history in histories.items():
        epochs = enumerate(history, start=1)
        writer.writerows((name, epoch, record[SELECTION]) for epoch, record in epochs if SELECTION in record)
    write_text(path, text.getvalue())


def write_summaries(folder: Path, rows: Sequence[Row]) -> None:
    """Write the figures that `dvc metrics` shows to <folder>/<model>.json."""
    shutil.rmtree(folder, ignore_errors=True)  # it may hold the models of another leaderboard
    for row in rows:
        write_json(folder / f"{row['model']}.json", {key: row[key] for key in SUMMARY})


def show(*, reports: Path = Path("reports")) -> None:
    """Print the leaderboard that `register` last wrote, and whether the candidate became champion.

    Args:
        reports: folder with leaderboard.json.

    Raises:
        FileNotFoundError: no run has written it.
    """
    if not (reports / LEADERBOARD).is_file():
        remedy = "run `make repro` first, or name the reports of another run, such as --reports runs/first/reports"
        if (reports / "reports" / LEADERBOARD).is_file():
            remedy = f"name --reports {reports / 'reports'}"
        raise FileNotFoundError(f"{reports / LEADERBOARD} not found: {remedy}")
    say(reports)


def say(reports: Path, more: Sequence[str] = ()) -> None:
    """Print the leaderboard in `reports` and what follows from it; after the lines `more`, the last say what to use."""
    report = read_json(reports / LEADERBOARD)
    console = Console()
    console.print(render(report["rows"]))
    for name in below_baseline(report["rows"]):
        best = best_baseline(report["rows"])
        assert best is not None
        console.print(f"{name} scores below the best baseline, {best['model']}, on validation", style="red")
    for warning in report["warnings"]:
        console.print(f"warning about the data: {warning}", style="red", markup=False, highlight=False)
    console.print(report["verdict"]["sentence"], markup=False, highlight=False)
    outcome = report["registry"]
    if outcome:
        console.print(decision(outcome), markup=False, highlight=False)
    lines = [*REGISTERED] if outcome else []
    lines += UNDER_DVC if reports == Path("reports") else ()
    if (reports / REPORT_PAGE).is_file():
        lines.append(f"{reports / REPORT_PAGE} shows learning curves, slices, and example recommendations with reasons")
    lines += [*more, *advice(report, reports.parent)]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def decision(outcome: Mapping[str, Any]) -> str:
    """Return what the gate decided, from the entry `registry` of leaderboard.json."""
    verb = "is the champion" if outcome["promoted"] else "is the candidate, not the champion"
    return (
        f"{outcome['registered_model']} version {outcome['version']} ({outcome['model']}) {verb}: {outcome['reason']}"
    )


def advice(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Return which model to use, by how much it differs from the best baseline, and the command that serves it.

    The `folder` of the run holds `artifacts` and, unless it is the project, params.yaml.
    """
    command = "python -m seqrec serve"
    if folder != Path():
        command += f" --params {shlex.quote(str(folder / 'params.yaml'))}"
    outcome = report["registry"]
    if outcome and outcome["champion"] and not outcome["promoted"]:
        if folder == Path():
            command += f" --dataset {shlex.quote(report['dataset'])}"  # perhaps not that of params.yaml
        return [f"Use the champion of {outcome['registered_model']}, which this run did not replace:", command]
    model = outcome["model"] if outcome else report["rows"][0]["model"]
    saved = shlex.quote(str(folder / "artifacts" / model / "finetuned"))
    return [_reason(model, report["verdict"]), f"{command} --saved {saved}"]


def _reason(model: str, verdict: Mapping[str, Any]) -> str:
    gain, baseline = verdict["gain"], verdict["baseline"]
    if not gain:
        return f"Use {model}, the best on validation:"
    size = f"{abs(gain['mean']):.4f}"
    if size == "0.0000":
        more, than, chance = "as good", "as", ""
    else:
        more, than = f"{size} NDCG@10 {'better' if gain['mean'] > 0 else 'worse'}", "than"
        chance = ", which may be chance" if gain["low"] <= 0 <= gain["high"] else ""
    if model == baseline:
        return f"Use {model}, a baseline; {verdict['model']}, the best trained model, is {more} on validation{chance}:"
    return f"Use {model}; it is {more} {than} {baseline}, the best baseline, on validation{chance}:"


def render(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return `rows` as a table for the terminal; `*` marks the champion, `+` a candidate that was not promoted."""
    refit = "; test figures after a refit on the validation events" if any(row["refit"] for row in rows) else ""
    title = f"Leaderboard at 10, ordered by validation NDCG{refit}"
    table = Table(title=title, box=None, pad_edge=False, collapse_padding=True)
    table.add_column("model", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    below = below_baseline(rows)
    for row in rows:
        table.add_row(*_cells(row), style=_style(row, below))
    table.caption = _caption(rows)
    return table


def _style(row: Mapping[str, Any], below: Sequence[str]) -> str:
    if row["model"] in below:
        return "bold red" if row["champion"] else "red"
    return "bold green" if row["champion"] else "dim" if row["baseline"] else ""


def _cells(row: Mapping[str, Any]) -> list[str]:
    mark = " *" if row["champion"] else " +" if row["candidate"] else ""
    low, high = (f"{row[f'test/ndcg@10/{end}']:.4f}".removeprefix("0") for end in ("low", "high"))
    return [
        row["model"] + mark,
        f"{row[SELECTION]:.4f}",
        rf"{row['test/ndcg@10']:.4f} \[{low}, {high}]",  # rich reads an unescaped [ as markup
        f"{row['test/recall@10']:.4f}",
        f"{row['test/mrr']:.4f}",
        f"{row['test/coverage@10']:.3f}",
        _short(row["parameters"]),
        f"{row['train_seconds']:.0f}",
    ]


def _short(count: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _caption(rows: Sequence[Mapping[str, Any]]) -> str:
    if any(row["champion"] for row in rows):
        return "* champion"
    if any(row["candidate"] for row in rows):
        return "+ candidate, not the champion"
    return "not registered"
