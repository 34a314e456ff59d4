"""The data of `seqrec auto`: columns, checks, split, and the number of cases to rank."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqrec.artifacts import INTERACTIONS, ITEMS, QUARANTINE, SOURCE_CARD, SPLIT_CARD, read_json, write_table
from seqrec.commands.auto_plan import Plan
from seqrec.config import Params, from_dict
from seqrec.data import data_warnings, sequences
from seqrec.data.splits import DAY
from seqrec.pipeline import BY_NAME
from seqrec.training import auto_settings

logger = logging.getLogger(__name__)
CORES = (5, 3, 2)  # minimum events per user and item, strictest first
KEPT = 0.5  # share of the events that a k-core must leave
CASES, KNOWN = 100, 0.2  # temporal split: minimum cases per part, and minimum share of trained users
SCORES, EVENTS = 500_000, 1_000  # most scores of a ranking, and events that it reads, per second of the budget
LEAST_CASES = 2_000  # so many are ranked at any rate
ODD_TIMES = 0.05  # maximum share of times in another format or outside 1990 to 2035
NEWEST_FIRST = 0.75  # minimum share of falling times that means that a file has its newest events first
FUTURE_TIMES = 0.005  # temporal split: maximum share of times after 2035, all of which are in the test part


def has_texts(folder: Path) -> bool:
    """Return whether items of the split tables in `folder` have text."""
    from seqrec.data import item_tokens

    return item_tokens.described(folder.parent / ITEMS, sequences.read_items(folder))


def tracking_uri(out: Path) -> str:
    """Return the address of the MLflow database of a run of `auto` in the folder `out`."""
    return f"sqlite:///{out.resolve()}/mlflow.db"


def prepare(plan: Plan, out: Path, console: Console) -> None:
    """Read, check and split the data, and put its settings into the plan; show the columns on `console`.

    Raises:
        ValueError: the data cannot be read or split; the message names the flag to set.
    """
    ingest, timed = _source(plan, out, console)
    content: dict[str, Any] = {"dataset": "auto", "leaderboard": [], "models": {}, "ingest": ingest}
    content |= {"evaluate": {}, "register": {"tracking_uri": tracking_uri(out)}}
    limits = {"min_date": "1970-01-01", "max_date": "5000-01-01", "max_duplicate_share": 1.0}
    content |= {"datasets": {"auto": {"validate": limits}}}
    try:
        for stage in ("ingest", "validate"):
            BY_NAME[stage](from_dict(content), out, "auto")
    except ValueError as error:
        facts = re.split(r" Check that ingest\.| Name the format| To go on", str(error))[0]  # without other settings
        flags = "\nOther columns can be named with --user, --item, --time, --time-format"
        raise ValueError(f"{facts}{flags if ingest['source'] == 'csv' else ''}") from error
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
        raise ValueError(
            f"{found}: name another column with --time, or the format of the times with --time-format; if the numbers "
            "are only in the order of the events, pass their column with --time"
        )
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
        found += column_guess.guess_items(Path(items["items"]), item, title, path)
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
        prepared = sequences.load(out / "data" / "sequences")
        few = not (prepared.trained().any() and prepared.card["counts"]["valid"] and prepared.card["counts"]["test"])
    except ValueError:
        few = True
    if few:
        raise ValueError(
            "no user has four events with items that occur at least twice: name other columns with --user or --item"
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
            return f"only {known:.1%} of the {word} cases belong to users with events before the first cut"
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
