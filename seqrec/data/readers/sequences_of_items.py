"""Files with item sequences but without times: growing prefixes, and lines of items as in repositories of papers.

Positions (0, 1, ...) are used as times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import polars as pl

from seqrec.config import IngestConfig
from seqrec.data.readers.blocks import MARKS, Frames, marked, read_lines
from seqrec.data.readers.csv_files import chosen_columns, columns_of, own_items
from seqrec.data.readers.delimited import delimited
from seqrec.data.readers.row_checks import NO_EVENTS, CheckedRows, Tables, interactions, quarantined, record_text

BLANKS = r"[ \t]+"


def growing_prefixes(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read `.inter` files with rows `user, history, next item`; a user's longest row is the sequence.

    Rows that are not prefixes of that sequence are bad: histories were cut at a maximum length, so events are lost. If
    files `item2index` and `user2index` (id, number) lie beside them, the numbers in the rows are mapped back to ids.
    """
    indices = {f"{kind}_id": files[f"{kind}2index"] for kind in ("item", "user") if f"{kind}2index" in files}
    return Tables(
        _prefix_blocks([files[role] for role in ("train", "valid", "test")], indices),
        own_items(files, config),
    )


def _prefix_blocks(paths: Sequence[Path], indices: Mapping[str, Path]) -> Iterator[CheckedRows]:
    rows = _with_longest(pl.concat([frame for path in paths for frame in _prefixes(path)]))
    cut = ~(pl.col("longest") + " ").str.starts_with(pl.col("sequence") + " ")
    problem = pl.when(cut).then(pl.lit("not a prefix of the user's longest sequence"))
    rows = rows.with_columns(pl.coalesce("_problem", problem).alias("_problem"))
    for (name,), bad in rows.filter(pl.col("_problem").is_not_null()).group_by("_file", maintain_order=True):
        yield CheckedRows(NO_EVENTS, quarantined(bad, str(name)))
    sequences = rows.filter(pl.col("_problem").is_null()).unique("user_id", keep="first", maintain_order=True)
    found = _exploded(sequences.select("user_id", pl.col("longest").str.split(" ").alias("item_id")), first=1)
    for column, path in indices.items():
        found = _with_ids(found, column, path)
    yield from interactions(iter([found]), paths[0])


def _prefixes(path: Path) -> Frames:
    chosen = chosen_columns(path, ("user_id", "item_id", "history"), (), {"history": "item_id_list"})
    for frame in columns_of(path, chosen):
        yield frame.with_columns(record_text(frame).alias("_text"), pl.lit(path.name).alias("_file"))


def _with_longest(rows: pl.DataFrame) -> pl.DataFrame:
    rows = rows.with_columns(
        pl.col("user_id").str.strip_chars(),
        pl.concat_str("history", pl.lit(" "), "item_id")
        .str.strip_chars()
        .str.replace_all(r"\s+", " ")
        .alias("sequence"),
    )
    length = pl.col("sequence").str.count_matches(" ", literal=True)
    return rows.with_columns(pl.col("sequence").sort_by(length).last().over("user_id").alias("longest"))


def _exploded(sequences: pl.DataFrame, first: int) -> pl.DataFrame:
    """Return an event for each item of the lists in `item_id`; `_line` numbers the events from `first`."""
    found = sequences.with_columns(pl.int_ranges(pl.col("item_id").list.len()).alias("timestamp"))
    return marked(found.explode("item_id", "timestamp"), pl.col("item_id"), first)


def _with_ids(found: pl.DataFrame, column: str, path: Path) -> pl.DataFrame:
    found = found.join(_index(path, column), on=column, how="left", maintain_order="left")
    unknown = pl.when(pl.col("_id").is_null()).then(pl.lit(f"{column} is not in {path.name}"))
    found = found.with_columns(pl.coalesce("_problem", unknown).alias("_problem"), pl.col("_id").alias(column))
    return found.drop("_id")


def _index(path: Path, column: str) -> pl.DataFrame:
    """Return `_id` and number of an index file.

    Raises:
        ValueError: a line is malformed, or repeats an id or a number, which would merge or duplicate events; or there
            is no line.
    """
    names = ("_id", column)
    frames = [frame.select("_line", "_problem", *names) for frame in delimited(path, names, "\t")]
    if not frames:
        raise ValueError(f"{path.name} is empty")
    stripped = pl.concat(frames).with_columns(pl.col(names).str.strip_chars())
    empty = pl.any_horizontal(pl.col(names).fill_null("") == "")
    repeated = pl.any_horizontal(pl.col(names).is_duplicated())
    problem = pl.coalesce(
        "_problem",
        pl.when(empty).then(pl.lit("no id or no number")),
        pl.when(repeated).then(pl.lit("this id or this number appears twice")),
    )
    bad = stripped.with_columns(problem.alias("_problem")).filter(pl.col("_problem").is_not_null())
    if not bad.is_empty():
        line, reason = bad.sort("_line").select("_line", "_problem").row(0)
        raise ValueError(f"{path.name}: {len(bad):,} of {len(stripped):,} lines are wrong; line {line}: {reason}")
    return stripped.select(names)


def lines_of_items(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read lines without a header: `user item item ...`, a line per user, or `user item`, a line per event, in order.

    `ingest.lines` is `sequences` or `pairs`; if it is empty, the format is detected from the first block.

    Raises:
        ValueError: the first block fits both formats.
    """
    path = files["interactions"]
    kind = config.lines or _kind(path)
    return Tables(
        _sequence_blocks(path) if kind == "sequences" else interactions(_pairs(path), path),
        own_items(files, config),
    )


def _kind(path: Path) -> str:
    for frame in _words(path):
        if frame.is_empty():
            continue
        longer = bool((frame["words"].list.len() > 2).any())
        repeated = frame["words"].list.first().n_unique() < len(frame)
        if longer != repeated:
            return "sequences" if longer else "pairs"
        if longer and frame["words"].list.len().n_unique() == 1:
            raise ValueError(
                f"{path.name}: the lines look like a table with blanks between columns: write a table "
                "with a header and a column of times, or lines `user item item ...`, oldest item first"
            )
        why = "some have more than one item, and users repeat" if longer else "each has one item, and no user repeats"
        raise ValueError(
            f"{path.name}: the lines may be sequences or pairs ({why}): set ingest.lines to one of them, or "
            "write a table with a header and a column of times"
        )
    raise ValueError(f"{path.name} is empty")


def _words(path: Path) -> Frames:
    for lines in read_lines(path):
        words = pl.col("_text").str.strip_chars().str.replace_all(BLANKS, " ").str.split(" ")
        yield lines.with_columns(words.alias("words"))


def _sequence_blocks(path: Path) -> Iterator[CheckedRows]:
    seen: set[str] = set()
    events_so_far = 0
    for frame in _words(path):
        frame = frame.with_columns(pl.col("words").list.first().alias("user_id"))
        again = ~frame["user_id"].is_first_distinct() | frame["user_id"].is_in(list(seen))
        seen.update(frame["user_id"])
        frame = frame.with_columns(
            pl.when(pl.col("words").list.len() < 2)
            .then(pl.lit("no items after the user"))
            .when(again)
            .then(pl.lit("the user has a line before this one"))
            .when(pl.col("_text").str.contains("\ufffd", literal=True))
            .then(pl.lit("not UTF-8"))
            .alias("_problem")
        )
        good = frame.filter(pl.col("_problem").is_null())
        found = _exploded(good.select("user_id", pl.col("words").list.slice(1).alias("item_id")), events_so_far + 1)
        events_so_far += len(found)
        yield CheckedRows(NO_EVENTS, quarantined(frame, path.name))
        yield from interactions(iter([found]), path)


def _pairs(path: Path) -> Frames:
    counts = pl.DataFrame(schema={"user_id": pl.String, "before": pl.Int64})
    for frame in _words(path):
        frame = frame.select(
            *MARKS,
            pl.col("words").list.get(0).alias("user_id"),
            pl.col("words").list.get(1, null_on_oob=True).alias("item_id"),
            pl.when(pl.col("words").list.len() != 2).then(pl.lit("not a user and an item")).alias("_wrong"),
        ).with_columns(pl.coalesce("_problem", "_wrong").alias("_problem"))
        fine = pl.col("_problem").is_null().cast(pl.Int64)
        frame = frame.join(counts, on="user_id", how="left", maintain_order="left").with_columns(
            (pl.col("before").fill_null(0) + fine.cum_sum().over("user_id") - fine).alias("timestamp")
        )
        fresh = frame.group_by("user_id").agg(fine.sum().alias("before"))
        counts = pl.concat([counts, fresh]).group_by("user_id").agg(pl.col("before").sum())
        yield frame.select(*MARKS, "user_id", "item_id", "timestamp")
