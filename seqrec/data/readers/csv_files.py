"""A user's own tables: CSV (also TSV, RecBole's atomic files and files without a header), JSON lines and Parquet."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from seqrec.config import IngestConfig
from seqrec.config.checks import suggestion
from seqrec.data.readers import parquet_files
from seqrec.data.readers.blocks import HEADER_BYTES, MARKS, Frames, read_lines
from seqrec.data.readers.delimited import delimited, parse
from seqrec.data.readers.json_lines import json_lines, keys
from seqrec.data.readers.row_checks import MISSING, Rows, Tables, interactions, items

TYPED = re.compile(r":(token|float|token_seq|float_seq)$")  # types in the headers of RecBole's atomic files
DELIMITERS = (",", "\t", ";", "|", "::")
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
TIME = re.compile(  # since 1970, ISO 8601, 20210403, 3.4.2021 or 3/4/21, 3-Apr-2021, or Sat Apr 03
    r"[12]\d{8,18}(\.\d+)?|[12]\d{3}[-/]\d\d?[-/]\d\d?([T ].*)?|(19|20)\d\d(0[1-9]|1[0-2])([0-2]\d|3[01])(T\d+Z?)?"
    r"|\d\d?(?P<by>[./-])\d\d?(?P=by)(\d\d){1,2}([ ,].*)?|\d\d?[ -][A-Z][a-z]{2}[ -]\d{2,4}( .*)?"
    r"|[A-Z][a-z]{2},? ([A-Z][a-z]{2} \d\d|\d\d [A-Z][a-z]{2}) .*"
)
OF_EVENTS = ("user_id", "timestamp", "rating")  # our columns that an items file does not have
OURS = ("user_id", "item_id", "timestamp", "rating", "title")
MAX_COLUMNS = 4096
RESERVED = (*MARKS, "_by", "_excess", "_seconds", "_rating")  # column names used internally
logger = logging.getLogger(__name__)


def own_files(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read a user's tables: CSV (also TSV, RecBole's atomic files), JSON lines, either of them gzip, or Parquet.

    `ingest.columns` maps our column names to those of the files; keys such as `items.item_id` are for the items file
    only, `user_id`, `timestamp` and `rating` for the log only, and an empty `rating` leaves the ratings out.

    Raises:
        ValueError: a column is missing, or `ingest.columns` refers to a column that no file has, or has an unknown key.
    """
    log = files["interactions"]
    found = own_items(files, config, header(log))
    return Tables(interactions(events(log, _shared(config)), log, config.time_format), found)


def own_items(files: Mapping[str, Path], config: IngestConfig, known: Sequence[str] = ()) -> Rows | None:
    """Read a user's file of items, if there is one; `ingest.columns` may also refer to the `known` columns.

    Raises:
        ValueError: a column is missing, or `ingest.columns` has an unknown key.
    """
    of_file = header(files["items"]) if "items" in files else []
    columns = {*known, *of_file}
    for name, column in config.columns.items():
        if column not in columns and (name, column) != ("rating", ""):
            raise ValueError(
                f"ingest.columns.{name}: no file has a column {column!r}; the columns are {_listed(sorted(columns))}"
            )
        key = name.removeprefix("items.")
        if key not in OURS and (column not in of_file or ("." in name and key == name)):
            raise ValueError(f"ingest.columns.{name}: unknown key{suggestion(key, OURS)}")
        if key not in OURS and (close := difflib.get_close_matches(key, OURS, 1, 0.8)):
            logger.warning("ingest.columns.%s: items get a column %s; did you mean %s?", name, key, close[0])
    if "items" not in files:
        return None
    of_items = {name[6:]: column for name, column in config.columns.items() if name.startswith("items.")}
    of_both = {name: column for name, column in _shared(config).items() if name not in OF_EVENTS}
    return items(catalogue(files["items"], of_both | of_items), files["items"])


def _shared(config: IngestConfig) -> dict[str, str]:
    return {name: column for name, column in config.columns.items() if "." not in name}


def events(path: Path, columns: Mapping[str, str]) -> Frames:
    """Yield the columns of an events file under our names; `columns` maps ours to the file's."""
    chosen = chosen_columns(path, ("user_id", "item_id", "timestamp"), ("rating",), columns)
    return _without_missing(columns_of(path, chosen))


def _without_missing(frames: Frames) -> Frames:
    for frame in frames:
        ids = [pl.col(name) for name in ("user_id", "item_id") if frame.schema[name] == pl.String]
        yield frame.with_columns(pl.when(~column.str.strip_chars().is_in(MISSING)).then(column) for column in ids)


def catalogue(path: Path, columns: Mapping[str, str], required: Sequence[str] = ("item_id",)) -> Frames:
    """Yield all columns of an items file, known columns under our names."""
    known = header(path)
    chosen = chosen_columns(path, required, ("title",), columns)
    ours = {column: name for name, column in columns.items()}
    for column in known:
        if column not in chosen.values():
            chosen.setdefault(ours.get(column, column), column)
    return columns_of(path, chosen, ("item_id", "title"))


def chosen_columns(
    path: Path, required: Sequence[str], optional: Sequence[str], columns: Mapping[str, str]
) -> dict[str, str]:
    """Return our name -> the file's for each of our columns that the file has, or JSON lines may have further down.

    Raises:
        ValueError: a required column is missing.
    """
    known, chosen = header(path), {}
    open_ended = not parquet_files.is_parquet(path) and bool(keys(path))
    for name in (*required, *(name for name in optional if columns.get(name) != "")):
        column = columns.get(name, name)
        column = column if column in known else name
        if column in known or (open_ended and name not in required):
            chosen[name] = column
        elif name in required:
            raise ValueError(
                f"{path.name} has no column {columns.get(name, name)!r}; "
                f"its columns are {_listed(known)}; set ingest.columns.{name}"
            )
    return chosen


def header(path: Path) -> list[str]:
    """Return the column names of a file, without RecBole's types; of JSON lines, the keys.

    The columns of a file without a header are column_1, column_2 and so on.

    Raises:
        ValueError: the file is empty or damaged, or column names are duplicate or reserved.
    """
    names = parquet_files.names(path) if parquet_files.is_parquet(path) else keys(path) or _csv_header(path).names
    if len(names) > MAX_COLUMNS:
        raise ValueError(f"{path.name} has {len(names):,} columns, more than {MAX_COLUMNS:,}: is this a table?")
    if len(set(names)) < len(names):
        raise ValueError(f"{path.name}: a column name appears twice in {_listed(names)}")
    for name in names:
        if "\0" in name:
            raise ValueError(
                f"{path.name}: the column name {name!r:.60} contains a NUL character: the file is not text, but "
                "perhaps an archive or a binary table; unpack it, or save it as CSV, JSON lines or Parquet"
            )
    for name in set(names) & set(RESERVED):
        raise ValueError(f"{path.name}: rename the column {name!r}: this name is reserved")
    return list(names)


def _listed(names: Sequence[str]) -> str:
    """Return the first names, shortened, for an error message."""
    shown = ", ".join(f"{name!r:.60}" for name in names[:20])
    return f"[{shown}, ... {len(names) - 20:,} more]" if len(names) > 20 else f"[{shown}]"


class _Header(NamedTuple):
    names: list[str]
    delimiter: str
    quoted: bool  # whether fields may be quoted
    lines: int  # above the first record


def _csv_header(path: Path) -> _Header:
    for lines in read_lines(path, size=HEADER_BYTES):
        if lines.is_empty():  # a block of blank lines
            continue
        if len(lines) > 1 and re.fullmatch(r"sep=.", lines["_text"][0]):  # for Excel
            lines = lines.slice(1)
        number, text = lines.row(0)[:2]
        delimiter = _delimiter(lines["_text"].to_list())
        fields, end = parse(text, delimiter)
        if end != "closed":
            raise ValueError(f"{path.name}: the quotes of the header do not match: {text:.80}")
        if is_record(fields):
            return _Header([f"column_{place}" for place in range(1, len(fields) + 1)], delimiter, True, number - 1)
        typed = all(TYPED.search(name) for name in fields)
        names = [TYPED.sub("", name.strip()) if typed else name.strip() for name in fields]
        first = {name: place for place, name in reversed(list(enumerate(names, 1)))} | dict.fromkeys(parquet_files.OURS)
        names = [f"{name}_{place}" if first[name] not in (place, None) else name for place, name in enumerate(names, 1)]
        return _Header(names, delimiter, not typed, number)
    raise ValueError(f"{path.name} is empty")


def _delimiter(texts: Sequence[str]) -> str:
    """Return the delimiter.

    It is `::` if each line has as many, and a blank if each has the same number of words, and one of three or more is a
    time; otherwise the most frequent of the first line, if possible of those that each line has as many of.
    """
    if "::" in texts[0] and len({text.count("::") for text in texts}) == 1:  # MovieLens: fields may hold any other
        return "::"
    regular = [by for by in DELIMITERS if by in texts[0] and len({text.count(by) for text in texts[:100]}) == 1]
    delimiter = max(regular or DELIMITERS, key=texts[0].count)
    words = [text.split(" ") for text in texts]
    even = delimiter not in texts[0] and len(set(map(len, words))) == 1
    return " " if even and len(words[0]) > 2 and any(map(TIME.fullmatch, words[-1])) else delimiter


def is_record(fields: Sequence[str]) -> bool:
    """Return whether the first line of a file is a record and no header.

    A field of a record is a time, or the first one a positive number, or all are numbers, but not 0, 1, 2, ...

    >>> is_record(["A1", "B2", "5.0", "1307056020"]), is_record(["17", "4", "3"]), is_record(["1", "Toy Story (1995)"])
    (True, True, True)
    >>> [is_record(["u1", "i2", time]) for time in ("20191015", "10/15/19 08:12", "15-Oct-2019 08:12")]
    [True, True, True]
    >>> is_record(["user", "item", "2024"]), is_record(["", "0", "1"]), is_record(["user"])
    (False, False, False)
    """
    found = [field.strip() for field in fields]
    if len(found) < 2:
        return False
    unnamed = [str(place) for place in range(len(found))]  # what pandas writes above columns without names
    if found == unnamed or found == ["", *unnamed[:-1]]:
        return False
    numbered = found[0].isdecimal() and found[0].strip("0") != ""
    return numbered or any(map(TIME.fullmatch, found)) or all(map(NUMBER.fullmatch, found))


def columns_of(path: Path, chosen: Mapping[str, str], plain: Sequence[str] = parquet_files.OURS) -> Frames:
    """Yield the chosen columns (our name -> the file's); those named in `plain` must hold no lists or structs."""
    wanted = {name: pl.col(column) for name, column in chosen.items()}
    if parquet_files.is_parquet(path):
        yield from parquet_files.frames(path, chosen, plain)
    elif keys(path):
        for frame in json_lines(path, dict.fromkeys(chosen.values(), pl.String)):
            yield frame.select(*MARKS, **wanted)
    else:
        names, delimiter, quoted, above = _csv_header(path)
        for frame in delimited(path, names, delimiter, quoted=quoted, skip=above):
            yield frame.select(*MARKS, **wanted)
