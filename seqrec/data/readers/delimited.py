"""Delimited text: regular blocks are parsed at once, others line by line in linear time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import polars as pl

from seqrec.data.readers.blocks import LONGEST_LINE, MARKS, Frames, as_lines, chunks, count, decoded, marked

LONGEST_RECORD = 1000  # lines; limits the damage of a stray quote
# A quoted field after its opening quote; possessive quantifiers do not backtrack, so time is linear.
QUOTED = re.compile(r'([^"]*+(?:""[^"]*+)*+)"')


def delimited(
    path: Path, names: Sequence[str], delimiter: str, *, encoding: str = "utf-8", quoted: bool = False, skip: int = 0
) -> Frames:
    """Yield the records of a delimited file with one string column for each of `names`, after `skip` lines."""
    carry = as_lines("", 1)  # lines of a record that continues in the next block
    for number, data in chunks(path):
        regular = encoding == "utf-8" and carry.is_empty()
        frame = _regular(data, number, names, delimiter, skip) if regular else None
        if frame is None:
            text = decoded(data, path) if encoding == "utf-8" else data.decode(encoding, "replace")
            lines = as_lines(text, number).filter(pl.col("_line") > skip)
            if quoted:
                frame, carry = _split_quoted(pl.concat([carry, lines]), names, delimiter, last=False)
            else:
                frame = _split(lines, names, delimiter)
        yield frame
    if not carry.is_empty():
        yield _split_quoted(carry, names, delimiter, last=True)[0]


def _regular(data: bytes, number: int, names: Sequence[str], delimiter: str, skip: int) -> pl.DataFrame | None:
    """Return the records of a regular block, in which no field is quoted and every line has all fields, else None.

    This is several times faster than splitting lines. `_text` is a struct of the fields, free until it is used.
    """
    if number <= skip:  # cut off what is above the records
        for _ in range(skip - number + 1):
            data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
        number = skip + 1
    lines = count(data, "\n") + (not data.endswith(b"\n"))
    if not data or len(names) == 1 or b'"' in data or b"\xef\xbf\xbd" in data:
        return None
    if count(data, delimiter) != lines * (len(names) - 1):
        return None
    if len(delimiter) > 1:
        if b"\t" in data:
            return None
        data = data.replace(delimiter.encode(), b"\t")
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    try:  # raises if a line has too many fields; with the right total, no line can have too few
        frame = pl.read_csv(
            data,
            has_header=False,
            separator=delimiter if len(delimiter) == 1 else "\t",
            quote_char=None,
            schema=dict.fromkeys(names, pl.String),
        )
    except pl.exceptions.PolarsError:
        return None
    if len(frame) != lines:
        return None
    record = pl.struct(pl.lit(delimiter).alias("_by"), *names)
    return marked(frame.fill_null(""), record, number).select(*MARKS, *names)


def _split(lines: pl.DataFrame, names: Sequence[str], delimiter: str) -> pl.DataFrame:
    fields = lines["_text"].str.split_exact(delimiter, len(names))
    frame = lines.with_columns(fields.struct.rename_fields([*names, "_excess"]).struct.unnest())
    missing, excess = pl.col(names[-1]).is_null(), pl.col("_excess").is_not_null()
    return frame.with_columns(
        pl.when(missing | excess).then(pl.lit(f"not {len(names)} columns")).alias("_problem")
    ).drop("_excess")


class Parsed(NamedTuple):
    """The fields of a line, and the state at its end; a doubled quote inside quotes is a quote."""

    fields: list[str]
    end: Literal["closed", "open", "broken"]  # open: inside quotes; broken: text after a closing quote


class Closing(NamedTuple):
    """The end of a record that begins a line inside quotes."""

    delimiters: int  # number of delimiters up to the end
    line: int


def _split_quoted(
    lines: pl.DataFrame, names: Sequence[str], delimiter: str, *, last: bool
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Split lines without quotes at once and the others record by record; a stray quote affects only its own line.

    A record spans several lines only if it then has the right number of columns.

    Returns:
        The records, and the last lines that may belong to a record of the next block, none if this is the `last` one.
    """
    marked = lines["_text"].str.contains('"', literal=True).arg_true().to_list()
    texts, numbers = lines["_text"].to_list() if marked else [], lines["_line"]
    closings: list[Closing | None] = []  # computed when a record first spans several lines
    plain = np.ones(len(lines), dtype=bool)
    records: list[tuple[Any, ...]] = []
    rest = len(lines)
    done = -1  # last line of the previous record
    for position, first in enumerate(marked):
        if first <= done:
            continue
        done, text = first, texts[first]
        fields, end = parse(text, delimiter)
        problem = None if len(fields) == len(names) else f"not {len(names)} columns"
        if end == "open":
            closings = closings or _closings(texts, marked, delimiter)
            closing = closings[position + 1]
            if closing == ENDLESS and not last and _may_go_on(texts, first):
                rest = first
                break
            if _fits(closing, first, len(names) - len(fields)) and not (
                delimiter == "\t" and _are_records((text, texts[first + 1], texts[closing.line]), len(names))
            ):
                done, end, problem = closing.line, "closed", None
                text = "\n".join(texts[first : done + 1])
                fields = parse(text, delimiter).fields
        if end != "closed":
            repaired = _repaired(text, delimiter, len(names))
            fields, problem = (repaired, None) if repaired else (fields, "quotes do not match")
        plain[first : done + 1] = False
        records.append((numbers[first], text, problem, *(fields if problem is None else [None] * len(names))))
    frame = _split(lines[:rest].filter(pl.Series(plain[:rest], dtype=pl.Boolean)), names, delimiter)
    frame = frame.select(*MARKS, *names)
    frame = pl.concat([frame, pl.DataFrame(records, schema=frame.schema, orient="row")]).sort("_line")
    return frame, lines[rest:]


def _are_records(texts: Sequence[str], columns: int) -> bool:
    """Return whether each line has all columns, so that quotes at their ends are text and join no lines."""
    return columns > 1 and all(text.count("\t") == columns - 1 for text in texts)


def _repaired(text: str, delimiter: str, columns: int) -> list[str] | None:
    """Return the fields of a line with quotes after backslashes, or, between tabs, `::` or `|`, that are text."""
    fields, end = parse(text.replace('\\"', '""'), delimiter)
    if end != "closed" and delimiter in ("\t", "::", "|"):
        fields, end = text.split(delimiter), "closed"
    return fields if end == "closed" and len(fields) == columns else None


ENDLESS = Closing(0, -1)  # the quotes are still open after the last line


def _closings(texts: list[str], marked: list[int], delimiter: str) -> list[Closing | None]:
    """Return the closing for each line with a quote; None if the quotes do not match.

    The parse of a line that begins inside quotes does not depend on where they were opened. Each line is therefore
    parsed once, from last to first, in linear time.
    """
    closings: list[Closing | None] = [None] * len(marked) + [ENDLESS]
    for position in reversed(range(len(marked))):
        fields, end = parse(texts[marked[position]], delimiter, inside=True)
        after = closings[position + 1]
        if end == "closed":
            closings[position] = Closing(len(fields) - 1, marked[position])
        elif end == "open" and after not in (None, ENDLESS):
            closings[position] = Closing(len(fields) - 1 + after.delimiters, after.line)
        elif end == "open":
            closings[position] = after
    return closings


def _may_go_on(texts: list[str], first: int) -> bool:
    return len(texts) - first < LONGEST_RECORD and sum(map(len, texts[first:])) < LONGEST_LINE


def _fits(closing: Closing | None, first: int, missing: int) -> TypeGuard[Closing]:
    return closing is not None and 0 <= closing.line - first < LONGEST_RECORD and closing.delimiters == missing


def parse(text: str, delimiter: str, *, inside: bool = False) -> Parsed:
    """Split a record, or a line of a record that begins `inside` quotes, in linear time."""
    fields: list[str] = []
    at = 0
    while True:
        if inside or text.startswith('"', at):
            at = at if inside else at + 1
            inside = False
            found = QUOTED.match(text, at)
            if found is None:
                return Parsed([*fields, text[at:]], "open")
            fields.append(found[1].replace('""', '"'))
            at = found.end()
            if at < len(text) and not text.startswith(delimiter, at):
                return Parsed(fields, "broken")
        else:
            end = text.find(delimiter, at)
            end = end if end >= 0 else len(text)
            fields.append(text[at:end])
            at = end
        if at >= len(text):
            return Parsed(fields, "closed")
        at += len(delimiter)
