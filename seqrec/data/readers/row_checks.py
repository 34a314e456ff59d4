"""Checks for the rows of all formats; good rows get canonical columns and types, bad rows a reason."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import polars as pl

from seqrec.artifacts import MAX_ID_LENGTH
from seqrec.config import IngestConfig
from seqrec.data.readers.blocks import MARKS
from seqrec.data.readers.times import LARGEST_SECONDS, seconds

logger = logging.getLogger(__name__)
MISSING = ("nan", "NaN", "NA", "N/A", "NULL", "null", "None", "<NA>", "\\N", "undefined")  # as programs write it
CONTROL = r"[\x00-\x1f\x7f-\x{9f}]"
ENTITY = r"&(#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]*);"
NO_EVENTS = pl.DataFrame(
    schema={"user_id": pl.String, "item_id": pl.String, "timestamp": pl.Int64, "row": pl.Int64, "rating": pl.Float32}
)


class CheckedRows(NamedTuple):
    """A block of rows: `good` has canonical columns, `bad` those of the quarantine."""

    good: pl.DataFrame
    bad: pl.DataFrame


Rows = Iterator[CheckedRows]


class Tables(NamedTuple):
    """The result of a reader; `items` is None if the source has no items file."""

    interactions: Rows
    items: Rows | None


Reader = Callable[[Mapping[str, Path], IngestConfig], Tables]


def interactions(frames: Iterable[pl.DataFrame], path: Path, time_format: str = "") -> Iterator[CheckedRows]:
    """Check and convert events with columns `user_id`, `item_id`, `timestamp` and optionally `rating`, of any type."""
    wrong_time = "timestamp is neither a number nor an ISO time"
    wrong_time = f"timestamp does not have the form {time_format}" if time_format else wrong_time
    for frame in frames:
        rating = _ratings(frame)
        frame = frame.with_columns(
            identifier(frame["user_id"]),
            identifier(frame["item_id"]),
            seconds(frame["timestamp"], time_format).alias("_seconds"),
            rating.cast(pl.Float32, strict=False).alias("_rating"),
        )
        if not _clean(frame, rating):
            frame = _with_problems(frame, rating, wrong_time)
        good = frame.filter(pl.col("_problem").is_null()).select(
            "user_id",
            "item_id",
            pl.col("_seconds").alias("timestamp"),
            pl.col("_line").alias("row"),
            pl.col("_rating").alias("rating"),
        )
        yield CheckedRows(good, quarantined(frame, path.name))


def tables(
    files: Mapping[str, Path], events: Iterable[pl.DataFrame], products: Iterable[pl.DataFrame] | None = None
) -> Tables:
    """Return the checked rows of the files `interactions` and, if there are `products`, `items`."""
    catalogue = None if products is None else items(products, files["items"])
    return Tables(interactions(events, files["interactions"]), catalogue)


def _ratings(frame: pl.DataFrame) -> pl.Series:
    if "rating" not in frame.columns:
        return pl.repeat(None, len(frame), dtype=pl.String, eager=True)
    rating = frame["rating"]
    if rating.dtype.is_float():
        return rating.fill_nan(None)
    rating = rating.cast(pl.String) if rating.dtype.is_temporal() else rating  # dates are not valid ratings
    if rating.dtype != pl.String:
        return rating
    rating = rating.str.strip_chars()
    return rating.set(rating.is_in(MISSING), None)


def _clean(frame: pl.DataFrame, rating: pl.Series) -> bool:
    """Return whether no row can have a problem; this is cheaper than finding the problem of each row."""
    times, ratings = frame["_seconds"], frame["_rating"]
    return (
        frame["_problem"].null_count() == len(frame) > 0
        and not any(frame[name].null_count() for name in ("user_id", "item_id", "_seconds"))
        and int(times.min()) >= 0  # type: ignore[arg-type]
        and int(times.max()) < LARGEST_SECONDS  # type: ignore[arg-type]
        and bool(ratings.is_finite().all())
        and not (ratings.is_null() & ~_blank(rating)).any()
        and all(_may_be_ids(frame[name]) for name in ("user_id", "item_id"))
        and (  # checked by `_regular`
            isinstance(frame.schema["_text"], pl.Struct)
            or not any(frame[name].str.contains("\ufffd", literal=True).any() for name in ("user_id", "item_id"))
        )
    )


def _may_be_ids(text: pl.Series) -> bool:
    sizes = text.str.len_bytes()
    return 0 < int(sizes.min()) <= int(sizes.max()) <= MAX_ID_LENGTH and not text.str.contains(CONTROL).any()  # type: ignore[arg-type]


def _with_problems(frame: pl.DataFrame, rating: pl.Series, wrong_time: str) -> pl.DataFrame:
    # Columns of dates or numbers cannot hold blank text.
    untimed = _blank(times := frame["timestamp"])
    if times.dtype == pl.String:
        untimed |= times.str.strip_chars().is_in([*MISSING, "NaT"]).fill_null(True)
    blanks = {"_no_time": untimed, "_rated": ~_blank(rating)}
    problem = (
        pl.when(pl.col("_no_time"))
        .then(pl.lit("no timestamp"))
        .when(pl.col("_seconds").is_null())
        .then(pl.lit(wrong_time))
        .when(pl.col("_seconds") < 0)
        .then(pl.lit("timestamp is negative"))
        .when(pl.col("_seconds") >= LARGEST_SECONDS)
        .then(pl.lit("timestamp is after the year 5138"))
        .when(pl.col("_rated") & ~pl.col("_rating").is_finite().fill_null(False))
        .then(pl.lit("rating is not a number"))
    )
    return frame.with_columns(**blanks).with_columns(
        pl.coalesce("_problem", _id_problem("user_id"), _id_problem("item_id"), problem).alias("_problem")
    )


def items(frames: Iterable[pl.DataFrame], path: Path) -> Iterator[CheckedRows]:
    """Check items with column `item_id`, optionally `title`, and attributes; values become stripped text or null."""
    garbled = 0
    for frame in frames:
        texts = [name for name in frame.columns if name not in (*MARKS, "item_id", "title")]
        title = frame["title"] if "title" in frame.columns else pl.Series([None] * len(frame), dtype=pl.String)
        frame = frame.select(
            *MARKS,
            identifier(frame["item_id"]),
            _cleaned(title.alias("title")),
            *(_cleaned(frame[name]) for name in texts),
        ).with_columns(unescaped(pl.col("title")))
        garbled += int(frame["title"].str.contains("\ufffd", literal=True).sum())
        frame = frame.with_columns(pl.coalesce("_problem", _id_problem("item_id")).alias("_problem"))
        good = frame.filter(pl.col("_problem").is_null()).drop(MARKS)
        yield CheckedRows(good, quarantined(frame, path.name))
    if garbled:
        logger.warning(
            "%s: %s titles are not UTF-8 and lose letters; save the file as UTF-8", path.name, f"{garbled:,}"
        )


def unescaped(text: pl.Expr) -> pl.Expr:
    """Replace HTML entities that end in `;`, but no bare `&`."""
    unescape = partial(re.sub, ENTITY, lambda match: html.unescape(match[0]))
    replaced = text.map_elements(unescape, return_dtype=pl.String, skip_nulls=True)
    return pl.when(text.str.contains(ENTITY)).then(replaced).otherwise(text)


def identifier(ids: pl.Series) -> pl.Series:
    """Return ids as text, whole numbers without a fraction; null for numbers that are not whole."""
    if ids.dtype.is_float():  # pandas stores integers as floats if one is missing
        ids = pl.select(pl.when(ids == ids.floor()).then(ids)).to_series().cast(pl.Int64, strict=False).alias(ids.name)
    text = ids.cast(pl.String).str.strip_chars().str.strip_chars("\u200b\ufeff").str.strip_chars()
    return text.str.replace(r"^(\d+)\.0+$", "$1") if text.str.contains(".0", literal=True).any() else text


def _id_problem(name: str) -> pl.Expr:
    column = pl.col(name)
    return (
        pl.when(column.is_null() | (column == ""))
        .then(pl.lit(f"no {name}"))
        .when(column.str.contains("\ufffd", literal=True))
        .then(pl.lit(f"{name} is not UTF-8"))
        .when(column.str.contains(CONTROL))
        .then(pl.lit(f"{name} has control characters, such as a line break"))
        .when(column.str.len_chars() > MAX_ID_LENGTH)
        .then(pl.lit(f"{name} has more than {MAX_ID_LENGTH} characters"))
    )


def _blank(values: pl.Series) -> pl.Series:
    return values.is_null() if values.dtype != pl.String else (values.str.strip_chars() == "").fill_null(True)


def _cleaned(values: pl.Series) -> pl.Series:
    if isinstance(values.dtype, pl.List):
        values = values.cast(pl.List(pl.String)).list.join(", ")
    values = values.cast(pl.String).str.strip_chars()
    return values.set(values == "", None)


def quarantined(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return the rows that have a problem as rows of the quarantine; `name` is that of the file."""
    bad = frame.filter(pl.col("_problem").is_not_null())
    return bad.select(
        pl.lit(name).alias("file"),
        pl.col("_line").alias("line"),
        pl.col("_problem").alias("reason"),
        record_text(bad).str.slice(0, 500).alias("text"),
    )


def record_text(frame: pl.DataFrame) -> pl.Expr:
    """Return the text of each record, joined from its fields if only those are left."""
    kind, text = frame.schema["_text"], pl.col("_text")
    if not isinstance(kind, pl.Struct) or frame.is_empty():
        return text.cast(pl.String)
    fields = [text.struct.field(field.name) for field in kind.fields[1:]]
    return pl.concat_str(fields, separator=frame["_text"][0]["_by"])
