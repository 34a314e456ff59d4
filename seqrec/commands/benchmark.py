"""Trains every model of a config under several seeds on one split, and writes one page that compares them.

The page has two columns for uncertainty: the spread over seeds, and the interval of the gain, which covers other users
and other seeds. A gain is paired over users, and over seeds if the base is a trained model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqrec import locks
from seqrec.artifacts import (
    CASES,
    METRICS,
    SPLIT_CARD,
    DamagedError,
    inputs_of,
    read_json,
    read_table,
    sha256,
    write_json,
    write_text,
)
from seqrec.code_closure import git_commit
from seqrec.commands import run
from seqrec.commands.settings import check, without_unfed
from seqrec.config import ConfigError, Params, load
from seqrec.evaluation import intervals, metrics
from seqrec.evaluation.compare import sign_flip_p_value
from seqrec.evaluation.metrics import SELECTION, TEST, FloatArray
from seqrec.models import REGISTRY
from seqrec.models.baselines import Constant
from seqrec.pipeline import BASELINES
from seqrec.stages.evaluate import evaluate
from seqrec.training.resume import fingerprint

logger = logging.getLogger(__name__)
ALONE = "alone"  # folder of the reports of models without their count term
FINISHED = "benchmark.json"  # the settings that a report was made with
PAGE = "benchmark.md"
NEW = "test/ndcg@10/popularity=cold"
MEANS = {  # of a row, the mean over its seeds -> the metric of a report
    "valid": SELECTION,
    "ndcg": TEST,
    "recall": "test/recall@10",
    "parameters": "parameters",
    "query_flops": "query_flops",
    "train_seconds": "train_seconds",
    "train_peak_mb": "train_peak_mb",  # peak of the process, including all earlier trainings
}
Row = dict[str, Any]


def benchmark(
    *,
    config_file: Path,
    out: Path,
    dataset: str = "",
    data: Path | None = None,
    seeds: str = "42",
    only: str = "",
    base: str = "",
) -> dict[str, float]:
    """Train and evaluate the missing models of a benchmark, and write benchmark.md and benchmark.json.

    Args:
        config_file: config in the form of params.yaml; `leaderboard` names the models.
        out: output folder for the data, one folder per seed, and the page of results.
        dataset: key in `datasets`; default: `dataset` in the config.
        data: folder with `sequences/` already prepared.
        seeds: seeds of initialisation, order and dropout, separated by commas.
        only: models to train, separated by commas; default: all. The page shows every model that is finished with
            the settings of `config_file` and the present code.
        base: model or baseline that the others are compared with; default: the best baseline on validation.

    Returns:
        The mean test NDCG@10 of each row.

    Raises:
        ConfigError: a model or seed does not exist, or models train on a share of the users (baselines would not).
        LockedError: another process runs in `out`.
    """
    params = load(config_file)
    params = replace(params, dataset=dataset or params.dataset)
    params = params if data else without_unfed(params)
    models = _names(only, params.leaderboard) or list(params.leaderboard)
    if base and base not in (*params.leaderboard, *BASELINES):
        raise ConfigError(f"--base: {base} is neither a baseline nor in `leaderboard`: {', '.join(params.leaderboard)}")
    check(params, ingests=data is None)
    numbers = [_seed(text) for text in seeds.split(",")]
    if any(params.section("finetune", model=model).user_share < 1 for model in models):
        raise ConfigError(
            "finetune.user_share: must be 1, because the baselines read every user; otherwise use scripts/text_demo.py"
        )
    with locks.locked(out / locks.NAME, f"--out {out}"):
        folder = (data or run.prepare_data(params, out)) / "sequences"
        _count_rows(params, folder, out)
        for seed in numbers:
            for model in models:
                _train(params.with_overrides({"seed": seed}), model, folder, out / f"seed-{seed}")
        try:
            return write_page(params, folder, out, base)
        except DamagedError as error:
            raise ValueError(f"{error}: remove the folder of this file, then run the benchmark again") from error


def _names(only: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := set(names) - set(known):
        raise ConfigError(f"--only: {', '.join(sorted(unknown))} not in `leaderboard`: {', '.join(known)}")
    return names


def _seed(text: str) -> int:
    if not text.strip().isdecimal():
        raise ConfigError(f"--seeds: {text!r} is not a number; separate seeds by commas, as in 42,43,44")
    return int(text)


def _is(path: Path, settings: dict[str, Any]) -> bool:
    try:
        return path.is_file() and read_json(path) == settings
    except DamagedError as error:
        logger.warning("%s; the model is evaluated again", error)
        return False


def is_finished(report: Path, params: Params, model: str, folder: Path, seed: int) -> bool:
    """Return whether the folder `report` has the figures of a model that was trained with these settings and seed."""
    return _is(report / FINISHED, _model_settings(params.with_overrides({"seed": seed}), model, folder))


def _count_settings(params: Params, folder: Path) -> dict[str, Any]:
    """Return what the figures of the baselines depend on."""
    split = read_json(folder / SPLIT_CARD)["split_sha256"]
    code = fingerprint("seqrec.stages.baselines", Constant.__module__, "")
    config = asdict(params.section("evaluate"))
    return {"split": split, "code": code, "filter_seen": params.filters_seen(), "evaluate": config}


def _model_settings(params: Params, model: str, folder: Path) -> dict[str, Any]:
    """Return what the figures of a model depend on."""
    sections = {name: asdict(params.section(name, model=model)) for name in ("pretrain", "finetune")}
    read = inputs_of(folder, params.sources)
    sections["read"] = {str(path.relative_to(folder.parent)): sha256(path) for path in read}
    architecture = params.model(model)
    module = REGISTRY.module(architecture.architecture)
    code = [fingerprint(f"seqrec.stages.{stage}", module, "") for stage in ("pretrain", "finetune", "evaluate")]
    return _count_settings(params, folder) | sections | {"model": asdict(architecture), "code": code}


def _count_rows(params: Params, folder: Path, out: Path) -> None:
    settings, done = _count_settings(params, folder), out / "reports" / FINISHED
    if not _is(done, settings):
        done.unlink(missing_ok=True)  # an interruption must not leave it beside other figures
        run.evaluate_baselines(params, folder, out)
        write_json(done, settings)


def _train(params: Params, model: str, folder: Path, out: Path) -> None:
    """Train and evaluate a model, with its counts and without, unless a report with the same settings exists."""
    settings, done = _model_settings(params, model, folder), out / "reports" / model / FINISHED
    if _is(done, settings):
        return
    logger.info("%s, seed %d", model, params.seed)
    done.unlink(missing_ok=True)  # an interruption must not leave it beside other figures
    run.train_model(params, model, folder, out)
    evaluate(
        model=model,
        sequences=folder,
        checkpoint=out / "artifacts" / model / "finetuned",
        report=out / ALONE / model,
        config=params.section("evaluate"),
        filter_seen=params.filters_seen(),
        without_counts=True,
    )
    write_json(done, settings)


def write_page(params: Params, folder: Path, out: Path, base: str = "") -> dict[str, float]:
    """Write the page of the models that are finished with these settings; return the mean test NDCG@10 of each row."""
    counts = {name: [out / "reports" / name] for name in BASELINES if (out / "reports" / name / METRICS).is_file()}
    reports = dict(counts)
    names = [path.name.removeprefix("seed-") for path in out.glob("seed-*")]
    seeds = sorted(int(name) for name in names if name.isdecimal())
    for model in params.leaderboard:
        of_seed = {seed: out / f"seed-{seed}/reports" / model for seed in seeds}
        found = [report for seed, report in of_seed.items() if is_finished(report, params, model, folder, seed)]
        reports |= {model: found} if found else {}
    if base and base not in reports:
        logger.warning("--base: %s is not finished with these settings and this code; a baseline takes its place", base)
    if counts and base not in reports:
        base = max(counts, key=lambda name: _mean(counts[name], SELECTION))
    rows = [_row(name, paths) for name, paths in reports.items()]
    if base in reports:
        user, others = ndcg_of_cases(reports[base])[0], [row for row in rows if row["model"] != base]
        differences = [_difference(reports[row["model"]], reports[base]) for row in others]
        for row, (gain, p_value) in zip(others, gains(user, differences), strict=True):
            row["gain"], row["p_value"] = gain, p_value
    rows.sort(key=lambda row: -row["valid"])
    split = read_json(folder / SPLIT_CARD)
    content = {"dataset": split["dataset"], "protocol": split["protocol"], "split_sha256": split["split_sha256"]}
    content |= {"commit": git_commit(), "base": base, "refit": params.section("evaluate").refit}
    write_json(out / "benchmark.json", content | {"rows": rows})
    write_text(out / PAGE, page(content, rows))
    logger.info("%s: %d rows", out / PAGE, len(rows))
    return {row["model"]: row["ndcg"] for row in rows}


def _mean(reports: Sequence[Path], name: str) -> float:
    return float(np.mean([read_json(report / METRICS).get(name, 0.0) for report in reports]))


def _row(name: str, reports: Sequence[Path]) -> Row:
    """Return the row of `name`, which has a report for each seed; what does not apply to it is None."""
    ndcg = [read_json(report / METRICS)[TEST] for report in reports]
    alone = [report.parents[1] / ALONE / name for report in reports]
    baseline = name in BASELINES
    return {
        "model": name,
        "baseline": baseline,
        "seeds": [] if baseline else [int(report.parents[1].name.removeprefix("seed-")) for report in reports],
        **{key: _mean(reports, metric) for key, metric in MEANS.items()},
        "spread": float(np.std(ndcg, ddof=1)) if len(ndcg) > 1 else None,
        "alone": _mean(alone, TEST) if all((path / METRICS).is_file() for path in alone) else None,
        "new": _mean(reports, NEW) if NEW in read_json(reports[0] / METRICS) else None,
        "gain": None,
        "p_value": None,
    }


def _difference(reports: Sequence[Path], base: Sequence[Path]) -> FloatArray:
    """Return the gain in NDCG@10 over the base for each seed and case (R, N).

    If both have seeds, only those of both count; one that has none, as a baseline, is compared with each seed.
    """
    ours, theirs = ({path.parents[1]: path for path in side} for side in (reports, base))
    if both := [seed for seed in ours if seed in theirs]:
        reports, base = [ours[seed] for seed in both], [theirs[seed] for seed in both]
    values, others = ndcg_of_cases(reports)[1], ndcg_of_cases(base)[1]
    alike = both or 1 in (len(values), len(others))
    return values - (others if alike else others.mean(0))


def ndcg_of_cases(reports: Sequence[Path]) -> tuple[Any, Any]:
    """Return the user of each test case (N,), and the NDCG@10 of each report and case (R, N).

    Raises:
        ValueError: the reports do not hold the same cases.
    """
    tables = [read_table(report / CASES) for report in reports]
    first = intervals.aligned(tables[0], tables[0], "test")[0]
    values = [metrics.ndcg(intervals.aligned(table, tables[0], "test")[0]["rank"], 10) for table in tables]
    return first["user"], np.stack(values)


def gains(user: NDArray[np.integer], differences: Sequence[FloatArray]) -> list[tuple[intervals.Interval, float]]:
    """Return the mean of each of the `differences` (R, N), with its interval and a p-value corrected for their number.

    Args:
        user: user of each case (N,).
        differences: a row's gains by seed and case.
    """
    totals = [np.bincount(user, weights=part.mean(0)).astype(float) for part in differences]
    p_values = holm([sign_flip_p_value(total, seed=42) for total in totals])
    return [
        (intervals.pigeonhole_bootstrap(part, user, seed=42), p_value)
        for part, p_value in zip(differences, p_values, strict=True)
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number: Holm, A simple sequentially rejective multiple test procedure (1979).

    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_values)
    scaled = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in corrected]


def page(content: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the page as Markdown."""
    table = [_cells(row, content["base"]) for row in rows]
    headings = [*table[0]] if table else []
    refitted = content["refit"] == "valid"
    lines = [
        f"# Benchmark on {content['dataset']}",
        "",
        f"{content['protocol']}, whole catalogue. Each NDCG is the mean over the seeds, ± their standard "
        "deviation. New items have no event in training. Gains are paired over users; their intervals cover other "
        "users and other seeds. P-values come from sign flips over users, "
        f"corrected for {sum(row['p_value'] is not None for row in rows)} comparisons. No settings were "
        "searched."
        + ("" if content["base"] in (*BASELINES, "") else " A gain covers the seeds that both models have.")
        + (" Test cases are ranked after a refit that also trains on the validation events." if refitted else ""),
        "",
        f"Commit `{content['commit'][:7] or 'unknown'}` · split `{content['split_sha256'][:12]}`",
        "",
        f"| {' | '.join(headings)} |",
        f"| --- |{' --: |' * (len(headings) - 1)}",
        *(f"| {' | '.join(cells.values())} |" for cells in table),
        "",
    ]
    return "\n".join(lines)


def _cells(row: Row, base: str) -> dict[str, str]:
    """Return what the page shows of a row, by heading."""
    gain = row["gain"]
    return {
        "model": row["model"],
        "seeds": ", ".join(map(str, row["seeds"])) or "-",
        "validation NDCG@10": f"{row['valid']:.4f}",
        "test NDCG@10": f"{row['ndcg']:.4f}" + ("" if row["spread"] is None else f" ± {row['spread']:.4f}"),
        "test recall@10": f"{row['recall']:.4f}",
        "test NDCG@10, no count term": _shown(row["alone"], ".4f"),
        "test NDCG@10, new items": _shown(row["new"], ".4f"),
        f"gain over {base} on test [95 %]": str(gain or "-"),
        "p, Holm": _shown(row["p_value"], ".3f"),
        "parameters": f"{row['parameters']:,.0f}",
        "MFLOP a query": _shown(row["query_flops"] / 1e6 or None, ".2f"),
        "train s": f"{row['train_seconds']:.0f}",
        "peak MB": _shown(row["train_peak_mb"] or None, ".0f"),
    }


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
