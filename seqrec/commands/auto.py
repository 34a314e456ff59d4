"""`seqrec auto`: finds the best model for a log within a time budget; the same command continues an interrupted run."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from seqrec import locks
from seqrec.artifacts import METRICS, REPORT_PAGE, SOURCE_CARD, SPLIT_CARD, DamagedError, read_json, sha256, write_text
from seqrec.commands import auto_data, auto_training, run
from seqrec.commands.auto_plan import Plan, refuse_others
from seqrec.config import Params, from_dict
from seqrec.config.ranges import Minutes
from seqrec.config.sections import EASE_ITEMS
from seqrec.data import data_warnings, sequences
from seqrec.evaluation import leaderboard
from seqrec.evaluation.metrics import SELECTION, TEST
from seqrec.training.auto_settings import Shape

PLAN = "auto.json"
CARD = "model-card.md"
MODELS = ("flash4rec", "sasrec", "recformer", "gru4rec")  # the order of training; the first model is always trained
TEXTS = 50_000  # most items of a catalogue for recformer: every epoch of training ends by encoding all of them
MEMBERS = 5  # for few users, the most networks of one model whose scores are averaged
EASE_SPEED = 5e9  # items cubed per second of the whole budget, so that EASE takes about a tenth of it on two cores


def auto(
    *,
    data: Path,
    out: Path,
    minutes: Minutes = 10.0,
    user: str = "",
    item: str = "",
    time: str = "",
    title: str = "",
    time_format: str = "",
    items: str = "",
) -> dict[str, float]:
    """Find the best model for a log within a time budget; columns, split and settings are chosen and shown.

    Args:
        data: CSV with or without a header, JSON lines, Parquet, or lines of `user item item ...`.
        out: folder that receives everything.
        minutes: time budget of the run in minutes; one model is trained even if that takes longer. A finished run goes
            on if it is given more.
        user: name of the column of users, instead of a guess.
        item: name of the column of items.
        time: name of the column of times.
        title: name of the column of the items' titles.
        time_format: format of the times, as in Python's strptime, such as %d/%m/%Y.
        items: file of items with their titles.

    Returns:
        The NDCG@10 of each model on validation and test.

    Raises:
        ValueError: the file cannot be read, or no events are left to learn from.
        LockedError: another process runs in `out`.
    """
    if data.is_dir():
        raise ValueError(f"--data: {data} is a folder: name one file")
    if not data.is_file():
        raise ValueError(f"--data: {data} not found")
    if items and not Path(items).is_file():
        raise ValueError(f"--items: {items} not found")
    named = {"user_id": user, "item_id": item, "timestamp": time, "title": title}
    columns = {name: column for name, column in named.items() if column}
    about = {"data": str(data.resolve()), "minutes": minutes}
    about["sha256"] = [sha256(path) for path in (data, Path(items)) if path.is_file()]
    with locks.locked(out / locks.NAME, f"--out {out}"):
        about |= {"columns": columns, "time_format": time_format, "items": items}
        refuse_others(out, PLAN)
        plan = Plan.load(out / PLAN, about, free=["minutes"])
        if plan.params:  # the folder may be a copy
            plan.params["register"]["tracking_uri"] = auto_data.tracking_uri(out)
        plan.save()
        try:
            return _auto(plan, out)
        except (DamagedError, FileNotFoundError) as error:
            raise ValueError(f"{error}; or remove {plan.path} and run again, which repeats the run") from error
        finally:
            if plan.done:
                plan.save()  # the time of what was interrupted counts too


def _auto(plan: Plan, out: Path) -> dict[str, float]:
    if "data" not in plan.done:
        auto_data.prepare(plan, out, Console())
    folder = out / "data" / "sequences"
    prepared = sequences.load(folder)
    text = auto_data.has_texts(folder)
    shape = Shape.of(prepared, described=text)
    auto_data.say_data(plan, prepared, out)
    if "counts" not in plan.done:
        left = plan.left()
        plan.ease_items = affordable_ease(float(plan.request["minutes"]))
        run.evaluate_baselines(from_dict(plan.params), folder, out, ease_items=plan.ease_items)
        plan.baselines_s = left - plan.left()
        plan.save("counts")
    models = [name for name in MODELS if name != "recformer" or (text and shape.items <= TEXTS)]
    for number, name in enumerate(models):
        if name not in plan.done:
            share = plan.left() / (len(models) - number)
            settings = functools.partial(auto_training.model_settings, name, shape)
            members = MEMBERS if shape.users < data_warnings.USERS and name != "recformer" else 1
            auto_training.train(plan, name, settings, folder, out, share=share, members=members)
    params = from_dict(plan.params)
    write_text(out / run.SETTINGS, params.as_yaml())
    reports = out / "reports"
    board = leaderboard.write(reports, folder, leaderboard.build(reports=reports, models=params.leaderboard))
    _write_pages(out, board, params)
    register = f"python -m seqrec import --run {shlex.quote(str(out))}"
    leaderboard.say(reports, [f"{out / CARD} describes the model", f"{register} registers it in MLflow"])
    plan.save()
    metrics = {name: read_json(reports / name / METRICS) for name in params.leaderboard}
    return {f"{name}/{key}": metrics[name][key] for name in metrics for key in (SELECTION, TEST)}


def affordable_ease(minutes: float) -> int:
    """Return the most items of a catalogue with EASE in a budget."""
    return min(EASE_ITEMS, int((60 * minutes * EASE_SPEED) ** (1 / 3)))


def _write_pages(out: Path, board: Mapping[str, Any], params: Params) -> None:
    """Write the report, and the card of the best model."""
    from seqrec.analysis import examples, report
    from seqrec.tracking.model_card import model_card
    from seqrec.training import saved

    reports, folder = out / "reports", out / "data" / "sequences"
    names = [row["model"] for row in board["rows"]]
    folders = {name: out / "artifacts" / name / "finetuned" for name in names}
    best = names[0]
    register = params.section("register")
    shown = examples.choose(
        leader=best,
        folders=folders,
        reports=reports,
        sequences=folder,
        number=register.examples,
        seed=register.seed,
    )
    histories = {name: saved.read(path).epoch_records() for name, path in folders.items()}
    metrics = {name: read_json(reports / name / METRICS) for name in names}
    write_text(reports / REPORT_PAGE, report.page(board, metrics, histories, shown))
    facts = map(read_json, (reports / best / METRICS, folder / SPLIT_CARD, out / "data" / SOURCE_CARD))
    write_text(out / CARD, model_card(saved.read(folders[best]).card, *facts))
