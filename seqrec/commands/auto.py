"""`seqrec auto`: finds the best model for a log within a time budget; the same command continues an interrupted run."""

from __future__ import annotations

import functools
import logging
import math
import shlex
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqrec import locks
from seqrec.artifacts import (
    INTERACTIONS,
    ITEMS,
    METRICS,
    QUARANTINE,
    REPORT_PAGE,
    SOURCE_CARD,
    SPLIT_CARD,
    DamagedError,
    read_json,
    sha256,
    write_json,
    write_table,
    write_text,
)
from seqrec.commands import run
from seqrec.config import AUTO, Params, from_dict
from seqrec.config.ranges import Minutes
from seqrec.config.sections import EASE_ITEMS
from seqrec.data import data_warnings, sequences
from seqrec.data.splits import DAY
from seqrec.evaluation import leaderboard
from seqrec.pipeline import BY_NAME
from seqrec.training import auto_settings
from seqrec.training.auto_settings import Shape

if TYPE_CHECKING:
    from seqrec.training.cost import Cost

logger = logging.getLogger(__name__)
PLAN = "auto.json"
CARD = "model-card.md"
MODELS = ("flash4rec", "sasrec", "recformer", "gru4rec")  # the order of training; the first model is always trained
OPTIONS: dict[str, dict[str, Any]] = {
    "flash4rec": {"prediction_head": False, "topk_dropout_k": 3},
    # a history as a sequence of items, each the mean of its words' vectors
    "recformer": {
        "encoder": "items",
        "objective": "causal",
        "d_model": 64,
        "layers": 0,
        "dropout": 0.1,
        "pooling": "mean",
        "frozen_words": (),
        "history_dropout": 0.3,
    },
    "sasrec": {"heads": 2},
    "gru4rec": {},
}
TEXTS = 50_000  # most items of a catalogue for recformer: every epoch of training ends by encoding all of them
CORES = (5, 3, 2)  # minimum events per user and item, strictest first
KEPT = 0.5  # share of the events that a k-core must leave
CASES, KNOWN = 100, 0.2  # temporal split: minimum cases per part, and minimum share of trained users
SCORES, EVENTS = 500_000, 1_000  # most scores of a ranking, and events that it reads, per second of the budget
LEAST_CASES = 2_000  # so many are ranked at any rate
LEAST_EPOCHS = 0.25  # share of a model's epochs that must fit into the budget, unless it is the first model
LEAST_STEPS = 100  # of the first model's training, or those of one epoch if they are fewer
RESERVE = 0.15  # share of a model's budget that counts and evaluation need
MEMBERS = 5  # for few users, the most networks of one model whose scores are averaged
ODD_TIMES = 0.05  # maximum share of times in another format or outside 1990 to 2035
NEWEST_FIRST = 0.75  # minimum share of falling times that means that a file has its newest events first
FUTURE_TIMES = 0.005  # temporal split: maximum share of times after 2035, all of which are in the test part
ModelSettings = Callable[[Mapping[str, int]], dict[str, Any]]  # entry of a model in `models`, from limits of finetune
EASE_SPEED = 5e9  # items cubed per second of the whole budget, so that EASE takes about a tenth of it on two cores


@dataclass
class Plan:
    """The decisions so far and the seconds spent, kept in a file."""

    path: Path
    request: dict[str, Any]
    params: dict[str, Any] = field(default_factory=dict)
    split: str = ""  # the protocol, and why
    done: list[str] = field(default_factory=list)  # completed steps: data, counts, models
    ease_items: int = 0  # largest catalogue with EASE
    baselines_s: float = 0.0  # for all baselines together
    spent: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def load(cls, path: Path, request: dict[str, Any], free: Collection[str] = ()) -> Plan:
        """Return the plan at `path`, a new one if there is none; the entries `free` of its request may change.

        Raises:
            ValueError: the plan was made for another request.
        """
        if not path.is_file() or not ((kept := read_json(path))["done"] or kept["params"]):
            return cls(path, request)  # nothing was begun: other flags are welcome
        before = kept["request"]
        if other := [key for key, value in request.items() if key not in free and before.get(key) != value]:
            raise ValueError(
                f"--out: {path} belongs to other data or other flags ({', '.join(other)}): "
                "name another folder, or remove this folder"
            )
        return cls(path, **(kept | {"request": before | request}))

    def save(self, done: str = "") -> None:
        """Write the plan; `done` is complete from now on."""
        now = time.monotonic()
        self.spent, self.began = self.spent + now - self.began, now
        self.done += [done] if done else []
        names = ("request", "params", "split", "done", "ease_items", "baselines_s", "spent")
        write_json(self.path, {name: getattr(self, name) for name in names})

    def left(self) -> float:
        """Return the remaining seconds of the budget; may be negative."""
        return 60 * float(self.request["minutes"]) - self.spent - (time.monotonic() - self.began)

    def set_model(self, name: str, settings: dict[str, Any]) -> None:
        """Add a model to the settings."""
        self.params["models"][name] = settings
        self.params["leaderboard"] = list(self.params["models"])
        self.save()


def refuse_others(folder: Path, *plans: str) -> None:
    """Raise ValueError if `folder` holds files, but none of `plans`, those of earlier runs: a run replaces files."""
    if not any((folder / plan).is_file() for plan in plans):
        others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        if others:
            raise ValueError(f"--out: {folder} holds other files, such as {others[0]}: name a new folder")


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
        prepare(plan, out, Console())
    folder = out / "data" / "sequences"
    prepared = sequences.load(folder)
    text = has_texts(folder)
    shape = Shape.of(prepared, described=text)
    say_data(plan, prepared, out)
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
            settings = functools.partial(model_settings, name, shape)
            members = MEMBERS if shape.users < data_warnings.USERS and name != "recformer" else 1
            train(plan, name, settings, folder, out, share=share, members=members)
    params = from_dict(plan.params)
    write_text(out / run.SETTINGS, params.as_yaml())
    board = run.write_leaderboard(out / "reports", folder, params.leaderboard)
    _write_pages(out, board, params)
    register = f"python -m seqrec import --run {shlex.quote(str(out))}"
    leaderboard.say(out / "reports", [f"{out / CARD} describes the model", f"{register} registers it in MLflow"])
    plan.save()
    metrics = {name: read_json(out / "reports" / name / METRICS) for name in params.leaderboard}
    return {f"{name}/{key}": metrics[name][key] for name in metrics for key in ("valid/ndcg@10", "test/ndcg@10")}


def affordable_ease(minutes: float) -> int:
    """Return the most items of a catalogue with EASE in a budget."""
    return min(EASE_ITEMS, int((60 * minutes * EASE_SPEED) ** (1 / 3)))


def has_texts(folder: Path) -> bool:
    """Return whether items of the split tables in `folder` have text."""
    from seqrec.data import item_tokens

    return item_tokens.described(folder.parent / ITEMS, sequences.read_vocabulary(folder)[0])


def prepare(plan: Plan, out: Path, console: Console) -> None:
    """Read, check and split the data, and put its settings into the plan; show the columns on `console`.

    Raises:
        ValueError: the data cannot be read or split; the message names the flag to set.
    """
    ingest, timed = _source(plan, out, console)
    content: dict[str, Any] = {"dataset": "auto", "leaderboard": [], "models": {}, "ingest": ingest}
    content |= {"evaluate": {}, "register": {"tracking_uri": f"sqlite:///{out.resolve()}/mlflow.db"}}
    limits = {"min_date": "1970-01-01", "max_date": "5000-01-01", "max_duplicate_share": 1.0}
    content |= {"datasets": {"auto": {"validate": limits}}}
    try:
        for stage in ("ingest", "validate"):
            BY_NAME[stage](from_dict(content), out, "auto")
    except ValueError as error:
        flags = "\nOther columns can be named with --user, --item, --time, --time-format"
        raise ValueError(f"{error}{flags if ingest['source'] == 'csv' else ''}") from error
    undivided = _check_times(out) if timed else "the file has no times"
    content["prepare"], plan.split = _split(from_dict(content), out, undivided)
    prepared = sequences.load(out / "data" / "sequences")
    most = int(plan.request.get("max_cases", _most_cases(prepared, 60 * float(plan.request["minutes"]))))
    if 0 < most < max(prepared.card["counts"][part] for part in ("valid", "test")):
        content["prepare"]["max_cases"] = most
        BY_NAME["prepare"](from_dict(content), out, "auto")
        prepared = sequences.load(out / "data" / "sequences")
    if data_warnings.repeats(prepared) > data_warnings.REPEATS:
        content["filter_seen"] = False
    plan.params = content
    plan.save("data")


def _check_times(out: Path) -> str:
    """Warn about times long ago or in the future; refuse them, or times in another format, if they are many.

    Returns:
        Why the log cannot be split by time; empty if it can.
    """
    import polars as pl

    from seqrec.data.column_guess import EARLIEST, LATEST

    times = pl.read_parquet(out / "data" / INTERACTIONS, columns=["timestamp"], glob=False)["timestamp"]
    wrong = pl.read_parquet(out / "data" / QUARANTINE, glob=False).filter(
        pl.col("reason").str.starts_with("timestamp ")
    )
    if len(wrong) > ODD_TIMES * (len(times) + len(wrong)):
        raise ValueError(
            f"{len(wrong):,} of {len(times) + len(wrong):,} times cannot be read: {wrong['reason'][0]}, such as "
            f"{wrong['text'][0]!r:.80}; set another format with --time-format, or name another column with --time"
        )
    odd = times.filter(~times.is_between(EARLIEST, LATEST))
    if odd.is_empty():
        return ""
    date = datetime.fromtimestamp(odd[0], UTC).date()
    found = f"{len(odd):,} of {len(times):,} times are not between 1990 and 2035, such as {date}"
    if len(odd) > ODD_TIMES * len(times):
        raise ValueError(f"{found}: name another column with --time, or the format of the times with --time-format")
    logger.warning("%s; these events are placed first or last in the histories of their users", found)
    future = int((odd > LATEST).sum())
    return f"{future:,} times are in the future" if future > FUTURE_TIMES * len(times) else ""


def _source(plan: Plan, out: Path, console: Console) -> tuple[dict[str, Any], bool]:
    """Return section `ingest` for the file, and whether the file has times; show the columns on `console`."""
    from seqrec.data import column_guess
    from seqrec.data.readers import csv_files

    path, request = Path(plan.request["data"]), plan.request
    items = {"items": str(Path(request["items"]).resolve())} if request["items"] else {}
    if not set(request["columns"]) - {"title"} and column_guess.is_lines(path):
        if request["time_format"] or (request["columns"] and not items):
            flag = "--time-format" if request["time_format"] else "--title"
            raise ValueError(f"{flag}: {path.name} has lines of `user item item ...`, without times and titles")
        console.print(f"{escape(path.name)}: lines of `user item item ...`, without times", highlight=False)
        section: dict[str, Any] = {"source": "lines", "interactions": str(path)} | items
        if items:
            found = column_guess.guess_items(Path(items["items"]), "item_id", request["columns"].get("title", ""))
            _show(Path(items["items"]), found, "", console)
            section["columns"] = {guess.name: guess.column for guess in found}
        return section, False
    chosen = dict(request["columns"])
    title = chosen.pop("title", "") if items else ""
    found, time_format = column_guess.guess(path, chosen, request["time_format"])
    found = [guess for guess in found if guess.name != "rating" and not (items and guess.name == "title")]
    if items:
        item = next(guess.column for guess in found if guess.name == "item_id")
        found += column_guess.guess_items(Path(items["items"]), item, title)
    timed = all(guess.why != column_guess.ORDER for guess in found)
    _show(path, found, time_format, console)
    columns = {guess.name: guess.column for guess in found}
    columns |= {"rating": ""} if "rating" in csv_files.header(path) else {}  # otherwise ingest reads it
    title = columns.pop("title", "")
    if title and not items:
        titled = _titles(path, columns["item_id"], title, out)
        items = {"items": str(titled)} if titled else {}
    section = {"source": "csv", "interactions": str(path), "columns": columns, "time_format": time_format}
    return section | items | {"max_bad_share": column_guess.MALFORMED}, timed


def _show(path: Path, found: Any, time_format: str, console: Console) -> None:
    flags = {"user_id": "--user", "item_id": "--item", "timestamp": "--time", "title": "--title"}
    flags["items.title"] = flags["title"]
    table = Table("field", "column", "found by", "to change it", title=escape(path.name), box=None, pad_edge=False)
    for guess in found:
        table.add_row(guess.name, escape(guess.column), guess.why, flags.get(guess.name, ""))
    if time_format:
        table.add_row("", escape(time_format), "", "--time-format")
    console.print(table)


def _titles(path: Path, item: str, title: str, out: Path) -> Path | None:
    """Write the first title of each item of a log to a file of items; None if items have several, as reviews do."""
    import polars as pl

    from seqrec.data import column_guess
    from seqrec.data.readers import csv_files, row_checks

    parts = [
        frame.select(row_checks.identifier(frame["item_id"]), pl.col("title").cast(pl.String).str.strip_chars())
        .filter(pl.col("title") != "")
        .unique(maintain_order=True)
        for frame in csv_files.columns_of(path, {"item_id": item, "title": title})
    ]
    target = out / "state" / "items.parquet"
    pairs = pl.concat(parts).drop_nulls("item_id").unique(maintain_order=True)
    rows = pairs.unique("item_id", keep="first", maintain_order=True)
    if len(pairs) > column_guess.TITLES * len(rows):
        logger.warning("%s is not read as the title: items have several of them", title)
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    write_table(target, rows.to_arrow(compat_level=pl.CompatLevel.oldest()))
    return target.resolve()


def _split(params: Params, out: Path, reason: str) -> tuple[dict[str, Any], str]:
    """Split by time, unless a `reason` speaks against it or a part has too little; return `prepare` and the reason."""
    order = {"newest_first": True} if _is_newest_first(out) else {}
    if not reason:
        settings: dict[str, Any] = {"protocol": "temporal", **order}
        try:
            settings |= _core(params, out, settings)
        except ValueError as error:
            reason = str(error)
        else:
            if not (reason := _too_little(sequences.load(out / "data" / "sequences"))):
                return settings, "temporal: events after a point in time are predicted from the events before it"
    settings = {"protocol": "LOO-full", **order}
    try:
        settings |= _core(params, out, settings)
        few = not len(sequences.cases(sequences.load(out / "data" / "sequences"), "valid"))
    except ValueError:
        few = True
    if few:
        raise ValueError(
            "no user has three events with items that occur at least twice: name another column with --user"
        )
    return settings, f"LOO-full (each user's last event), because a split by time is not possible: {reason}"


def _is_newest_first(out: Path) -> bool:
    """Return whether times mostly fall from row to row, so that events of one time are in this order too."""
    import polars as pl

    change = pl.read_parquet(out / "data" / INTERACTIONS, columns=["timestamp"], glob=False)["timestamp"].diff()
    falls = int((change < 0).sum())
    return falls > NEWEST_FIRST * (falls + int((change > 0).sum()))


def _core(params: Params, out: Path, settings: Mapping[str, Any]) -> dict[str, int]:
    """Prepare with the strictest k-core that keeps half of the events, or else with the least strict one."""
    for least in CORES:
        core = {"min_user_events": least, "min_item_events": least}
        try:
            BY_NAME["prepare"](from_dict(params.as_dict() | {"prepare": {**settings, **core}}), out, "auto")
        except ValueError:
            if least == CORES[-1]:
                raise
            continue
        card = read_json(out / "data" / "sequences" / SPLIT_CARD)
        kept = card["counts"]["events"]
        if least == CORES[-1] or kept >= KEPT * (kept + card["dropped"]["events outside the k-core"]):
            break
    return core


def _most_cases(prepared: sequences.Sequences, seconds: float) -> int:
    """Return how many cases are ranked at most: every epoch of every model ranks them again."""
    cases = sequences.cases(prepared, "valid")
    read = (cases.position - prepared.start[cases.user]).clamp(1, auto_settings.LENGTHS[1]).double().mean()
    return max(LEAST_CASES, int(seconds * min(SCORES / prepared.num_items, EVENTS / float(read))))


def _too_little(prepared: sequences.Sequences) -> str:
    """Return why a temporal split has too few events or cases; empty if it has enough."""
    card = prepared.card
    for part, word in (("valid", "validation"), ("test", "test")):
        cases = sequences.cases(prepared, part)
        if len(cases) < CASES:
            return f"only {len(cases)} {word} cases"
        if (known := float(prepared.trained(cases.user).double().mean())) < KNOWN:
            return f"only {known:.0%} of the {word} cases belong to users with events before the first cut"
    if card["test_cut"] - card["valid_cut"] < DAY:
        return "validation spans less than a day"
    return ""


def _say_malformed(out: Path) -> None:
    import polars as pl

    if number := read_json(out / "data" / SOURCE_CARD)["counts"]["quarantined"]:
        bad = pl.read_parquet(out / "data" / QUARANTINE, glob=False)
        reason = bad["reason"].value_counts(sort=True)["reason"][0]
        where = out / "data" / QUARANTINE
        logger.warning(
            "%s malformed rows are left out; the most common reason: %s; all are in %s", f"{number:,}", reason, where
        )


def say_data(plan: Plan, prepared: sequences.Sequences, out: Path) -> None:
    """Log the split, the numbers of users, items and events, and the warnings about the data."""
    card = prepared.card
    _say_malformed(out)
    words = {"users": "users", "items": "items", "events": "events", "valid": "validation cases", "test": "test cases"}
    counts = ", ".join(f"{card['counts'][name]:,} {word}" for name, word in words.items())
    logger.info("split: %s", plan.split)
    logger.info("data: %s", counts)
    if most := card.get("max_cases"):
        logger.info("%s random cases of each are ranked, because all would take long", f"{most:,}")
    if left_out := ", ".join(f"{number:,} {rule}" for rule, number in card["dropped"].items() if number):
        logger.info("left out: %s (k-core %d)", left_out, card["k_core"]["user"])
    if not plan.params.get("filter_seen", True):
        logger.info("users often return to an item, so past items stay candidates")


def train(
    plan: Plan,
    name: str,
    settings: ModelSettings,
    folder: Path,
    out: Path,
    *,
    share: float | None = None,
    members: int = 1,
) -> None:
    """Train and evaluate one model; leave it out if too few epochs fit into the budget, unless it is the first.

    `settings` returns the model's entry, given the epochs and their steps that fit into the budget, which limits them
    only if a `share` is given. The model has up to `members` networks, as many as can be trained for all epochs in
    `share` seconds.
    """
    if name not in plan.params["models"]:
        entry = settings({})
        if share is not None:
            if not (fit := _fit(plan, name, entry, folder, out, share)):
                return
            entry = settings(fit.limits)
            entry["finetune"].setdefault("ease_items", plan.ease_items)
            if (affordable := min(members, fit.of_share // fit.limits["epochs"])) > 1:
                entry["options"]["members"] = affordable
                logger.info("%s is the mean of %d networks, because the data has few users", name, affordable)
        plan.set_model(name, entry)
    run.train_model(from_dict(plan.params), name, folder, out)
    plan.save(name)


def model_settings(
    name: str,
    shape: Shape,
    limits: Mapping[str, int],
    *,
    options: Mapping[str, Any] | None = None,
    pretrain: Mapping[str, Any] | None = None,
    finetune: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the entry of a model in `models`: the settings given, and those of the rules for everything else.

    `limits` take the place of settings of `finetune`.
    """
    given = {**(finetune or {}), **limits}
    ruled = auto_settings.options(name, shape) | OPTIONS.get(name, {})
    set_ = {option: value for option, value in (options or {}).items() if value != AUTO or option not in ruled}
    chosen = auto_settings.merged(ruled, set_, "options")
    return {
        "options": chosen,
        "pretrain": {"item_vectors": auto_settings.item_vectors(shape, chosen)} | dict(pretrain or {}),
        "finetune": {"counts": "auto"} | auto_settings.finetune(shape, given, name, chosen),
    }


class Fit(NamedTuple):
    """The training that fits into the budget."""

    limits: dict[str, int]  # settings of finetune
    of_share: int  # epochs that fit into the model's equal share of the time


def _fit(plan: Plan, name: str, entry: Mapping[str, Any], folder: Path, out: Path, share: float) -> Fit | None:
    """Return the training that a model gets, estimated from a few steps; None leaves it out.

    It gets all epochs that fit into the budget, at the cost of the models after it, because one sound model beats three
    poor ones. If fewer than FEWEST_EPOCHS fit, it gets so many of fewer steps.
    """
    first = not plan.params["models"]
    if share <= 0 and not first:
        logger.warning("%s is left out: the budget is spent", name)
        return None
    settings = {"models": {name: entry}, "leaderboard": [name]}
    params = from_dict(plan.params | settings)
    began = time.monotonic()
    BY_NAME["pretrain"](params, out, name, sequences=folder, data=folder.parent)
    cost = _cost(params, name, folder, out)
    wanted = params.section("finetune", model=name).epochs
    probe = time.monotonic() - began
    left = max(0.0, plan.left())
    of_share, training_s = (_for_training(seconds, cost, plan.baselines_s) for seconds in (share - probe, left))
    most, steps = int(training_s / cost.epoch_s), cost.steps
    if most < LEAST_EPOCHS * wanted and not first:
        logger.warning("%s is left out: %d of its %d epochs fit into the %.0f s left", name, most, wanted, left)
        return None
    epochs = min(wanted, max(most, auto_settings.FEWEST_EPOCHS))
    if most < epochs:
        affordable = int((training_s / epochs - cost.validation_s) / cost.step_s)
        if affordable < (least := math.ceil(min(LEAST_STEPS, cost.steps) / epochs)):
            logger.warning(
                "%.0f s of the budget are left after data and baselines, too few for %d epochs of %d steps of %s and "
                "its evaluation: it is trained so long, and the run takes longer",
                left,
                epochs,
                least,
                name,
            )
        steps = min(cost.steps, max(least, affordable))
    seconds = epochs * (steps * cost.step_s + cost.validation_s)
    estimate = f"about {seconds:.0f} s at most; {cost.memory / 1e9:.1f} GB of memory so far"
    some = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    part = f" of the {cost.steps}" if steps < cost.steps else ""
    logger.info("%s: %s of %d%s steps, %s", name, some, steps, part, estimate)
    shortened = {"epoch_steps": steps} if steps < cost.steps else {}
    return Fit({"epochs": epochs, **shortened}, int(of_share / cost.epoch_s))


def _for_training(seconds: float, cost: Cost, baselines_s: float) -> float:
    """Return how many of `seconds` remain for epochs, beside counts and evaluation."""
    reserve = max(RESERVE * seconds, baselines_s / 2)  # counts for a model are searched as those of a baseline are
    return max(0.0, seconds - reserve - 4 * cost.validation_s)


def _cost(params: Params, name: str, folder: Path, out: Path) -> Cost:
    """Return the cost of an epoch of a model, estimated from a few steps on its initial weights."""
    import torch
    from accelerate import Accelerator

    from seqrec.training import cost
    from seqrec.training.checkpoint import load_checkpoint

    return cost.measure(
        load_checkpoint(out / "artifacts" / name / "initial").model,
        sequences.load(folder),
        stage="finetune",
        config=params.section("finetune", model=name),
        filter_seen=params.filters_seen(),
        accelerator=Accelerator(cpu=not torch.cuda.is_available()),
    )


def _write_pages(out: Path, board: Mapping[str, Any], params: Params) -> None:
    """Write the report, and the card of the best model."""
    from seqrec.analysis import examples, report
    from seqrec.tracking.model_card import model_card
    from seqrec.training.checkpoint import load_checkpoint

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
    histories = {name: load_checkpoint(folder).epoch_records() for name, folder in folders.items()}
    metrics = {name: read_json(reports / name / METRICS) for name in names}
    write_text(reports / REPORT_PAGE, report.page(board, metrics, histories, shown))
    facts = map(read_json, (reports / best / METRICS, folder / SPLIT_CARD, out / "data" / SOURCE_CARD))
    write_text(out / CARD, model_card(load_checkpoint(folders[best]).card, *facts))
