"""Which columns of a user's own table hold users, items and times: by name, then by content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from seqrec.data.readers import csv_files, parquet_files
from seqrec.data.readers.times import seconds

ROWS = 5_000  # that are looked at
WORDS = {  # role -> words of its names, the surest first
    "user_id": (
        *("user", "uid", "customer", "client", "member", "visitor", "reviewer", "buyer", "shopper", "person"),
        *("account", "session", "subscriber", "listener", "player", "student"),
    ),
    "item_id": (
        *("item", "iid", "sku", "product", "movie", "asin", "article", "book", "isbn", "track", "song", "video"),
        *("film", "game", "business", "venue", "location", "course", "artist", "content", "page", "url"),
    ),
    "timestamp": (
        *("timestamp", "time", "datetime", "date", "ts", "unix", "when", "bought", "purchased", "ordered", "created"),
        *("watched", "clicked", "viewed", "played", "at", "day"),
    ),
    "rating": ("rating", "ratings", "stars", "overall", "rate", "score"),
    "title": ("title", "name"),
}
ID_WORDS = {"id", "code", "no", "nr", "number", "key", "sk"}  # of a name that says whose id it holds
REQUIRED = ("user_id", "item_id", "timestamp")
FORMATS = (  # tried where a time is neither a number nor ISO 8601
    *("%d/%m/%Y %H:%M:%S", "%m/%d/%Y %H:%M:%S", "%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M", "%d/%m/%Y", "%m/%d/%Y"),
    *("%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d.%m.%Y", "%d-%m-%Y %H:%M:%S", "%d-%m-%Y"),
    *("%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d", "%Y%m%d%H%M%S", "%m %d, %Y", "%d %b %Y", "%b %d, %Y"),
)
EARLIEST, LATEST = 631_152_000, 2_051_222_400  # 1990 and 2035: a rating is no time
FIT = 0.95  # share of the values that must be times


class Guess(NamedTuple):
    """A column of ours, the file's column that seems to hold it, and what says so."""

    name: str
    column: str
    why: str


def is_lines(path: Path) -> bool:
    """Say whether a text file holds `user item item ...`, separated by blanks and without a header."""
    if parquet_files.is_parquet(path):
        return False
    names = csv_files.header(path)
    return len(names) == 1 and len(names[0].split()) > 1


def guess(path: Path, chosen: Mapping[str, str], time_format: str = "") -> tuple[list[Guess], str]:
    """Return which columns of a CSV or Parquet file are ours, and the format of its times, empty if none is needed.

    Args:
        path: the file, with a header.
        chosen: our column -> the file's, where the caller knows.
        time_format: of strptime; empty guesses.

    Raises:
        ValueError: a chosen column is not there, the file has no header, or a required column cannot be told.
    """
    names = csv_files.header(path)
    for name, column in chosen.items():
        if column not in names:
            raise ValueError(f"{path.name} has no column {column!r} for {name}; there are {', '.join(names):.300}")
    if not parquet_files.is_parquet(path) and all(re.fullmatch(r"[-+.\d]+", name) for name in names):
        raise ValueError(
            f"{path.name} begins with values, {', '.join(names):.80}: give it a header line such as "
            "user_id,item_id,timestamp"
        )
    rows = _sample(path, names)
    found = [Guess(name, column, "as you said") for name, column in chosen.items()]
    for role in WORDS:
        if role not in chosen and (named := _by_name(role, names, {one.column for one in found})):
            found.append(Guess(role, named, "its name"))
    for role in ("timestamp", "user_id", "item_id"):
        taken = {one.column for one in found}
        if all(one.name != role for one in found) and (fitting := _by_content(role, rows, taken)):
            found.append(Guess(role, fitting, "its values"))
    roles = {one.name: one.column for one in found}
    for role, flag in zip(REQUIRED, ("--user", "--item", "--time"), strict=True):
        if role not in roles:
            raise ValueError(f"{path.name}: no column looks like {role} among {', '.join(names):.300}; name it: {flag}")
    return sorted(found, key=lambda one: list(WORDS).index(one.name)), time_format or _time_format(
        rows[roles["timestamp"]], roles["timestamp"]
    )


def words_of(name: str) -> list[str]:
    """Return the words of a column name in lower case: `customerID`, `customer_id` and `Customer ID` are the same."""
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return [word for word in re.split(r"[^a-z0-9]+", parts.lower()) if word]


def _sample(path: Path, names: Sequence[str]) -> pl.DataFrame:
    frames = csv_files.columns_of(path, {name: name for name in names})
    return next(iter(frames)).select(names).head(ROWS)


def _by_name(role: str, names: Sequence[str], taken: set[str]) -> str | None:
    scored = [(_score(role, name), -place, name) for place, name in enumerate(names) if name not in taken]
    score, _, best = max(scored, default=(0.0, 0, ""))
    return best if score > 0 else None


def _score(role: str, name: str) -> float:
    """Return how well a name fits a role; 0: not at all."""
    words = words_of(name)
    joined = "".join(words)
    stem = next((joined[: -len(end)] for end in ("id", "ids") if joined.endswith(end) and len(joined) > 4), joined)
    told = {role_: _place(role_, [*words, stem]) for role_ in WORDS}
    if told[role] is None:
        return 0.0
    if role in ("user_id", "item_id") and told["title"] is not None and not ID_WORDS & set(words):
        return 0.0 if role == "item_id" else 0.1  # a product's name is its title; a user's name may be all there is
    if role == "title" and told["user_id"] is not None:
        return 0.0
    if role == "timestamp" and told["rating"] is not None:
        return 0.0
    if role == "rating" and told["timestamp"] is not None:
        return 0.0
    place = told[role]
    assert place is not None
    exact = 2.0 if len(set(words) - ID_WORDS) <= 1 else 1.0
    return exact + 1 / (2 + place)


def _place(role: str, words: Sequence[str]) -> int | None:
    return next((place for place, word in enumerate(WORDS[role]) if word in words), None)


def _by_content(role: str, rows: pl.DataFrame, taken: set[str]) -> str | None:
    """Return the first free column whose values fit: times are dates, ids repeat and are no fractions."""
    free = [column for column in rows.columns if column not in taken]
    if role == "timestamp":
        return next((column for column in free if _is_time(rows[column])), None)
    return next((column for column in free if _is_id(rows[column])), None)


def _is_time(values: pl.Series) -> bool:
    if _share_of_times(values, "") >= FIT:
        return True
    return values.dtype == pl.String and any(_share_of_times(values, text) >= FIT for text in FORMATS)


def _share_of_times(values: pl.Series, time_format: str) -> float:
    if values.dtype == pl.Boolean or not len(values):
        return 0.0
    found = seconds(values, time_format)
    return int(found.is_between(EARLIEST, LATEST).fill_null(False).sum()) / len(values)


def _is_id(values: pl.Series) -> bool:
    """Say whether a column may hold ids: more than a scale of ratings has, some of them twice, no fractions."""
    text = values.cast(pl.String, strict=False).drop_nulls()
    if values.dtype == pl.Boolean or text.is_empty() or text.str.contains(r"^[-+]?\d*\.\d+$").mean() > 0.5:  # type: ignore[operator]
        return False
    distinct = text.n_unique()
    return distinct > 10 and distinct < len(text)


def _time_format(values: pl.Series, column: str) -> str:
    """Return the first of `FORMATS` that the values have; empty where they need none."""
    if values.dtype != pl.String or _share_of_times(values, "") > 0:
        return ""
    known = values.filter(values.str.strip_chars() != "")
    fitting = [text for text in FORMATS if _share_of_times(known, text) >= FIT]
    if not fitting:
        example = "" if known.is_empty() else f" such as {known[0]!r:.40}"
        raise ValueError(f"the times of {column}{example} have no known format: say --time-format, or another --time")
    return fitting[0]
