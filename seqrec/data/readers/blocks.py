"""Text files, plain or gzip, read as blocks of whole lines, so that memory is bounded by a block.

A frame of lines has the columns `MARKS`: `_line` (1-based), `_text` (the record as published) and `_problem` (null
where nothing is wrong so far). Readers carry them along; `row_checks` turns them into the quarantine.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

BLOCK_BYTES = 1 << 24
HEADER_BYTES = 1 << 16
LONGEST_LINE = 1 << 26  # a file with more bytes than this before a line end is no text file, and must not fill memory
MARKS = ("_line", "_text", "_problem")
WEB_PAGE = (b"<!doctype html", b"<html")

Frames = Iterator[pl.DataFrame]


class DamagedFileError(ValueError):
    """A file is cut short or corrupt: fetching it again may help. `path` is that file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path.name} {reason}; fetch it again")
        self.path = path


def read_lines(path: Path, *, encoding: str = "utf-8", size: int = 0) -> Frames:
    """Yield the lines of a text file, plain or gzip, that are not blank.

    Bytes that are not `encoding` become U+FFFD. `size` is the size of a block in bytes; 0: BLOCK_BYTES.

    Raises:
        DamagedFileError: the gzip stream is cut short or corrupt, or the file is a web page.
        ValueError: this is no text file.
    """
    for number, data in chunks(path, size):
        yield as_lines(data.decode(encoding, "replace"), number)


def chunks(path: Path, size: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines, each with the number of its first line; every line end is a line feed."""
    mac = _line_ends_are_carriage_returns(path)
    pending: list[bytes] = []  # the beginning of a line whose end has not been read; joined once
    number = 1
    with opened(path) as stream:
        while chunk := _read(stream, path, size or BLOCK_BYTES):
            chunk = chunk.replace(b"\r", b"\n") if mac else chunk
            end = chunk.rfind(b"\n") + 1
            if end:
                whole = b"".join([*pending, chunk[:end]])
                pending = [chunk[end:]]
                yield number, _without_marker(whole, number)
                number += count(whole, "\n")
            else:
                pending.append(chunk)
                if sum(map(len, pending)) > LONGEST_LINE:
                    length = sum(map(len, pending))
                    raise ValueError(f"{path.name}: no line end in {length:,} bytes; this is no text file")
    rest = _without_marker(b"".join(pending), number)
    if rest:
        yield number, rest


def _without_marker(data: bytes, number: int) -> bytes:
    return data.removeprefix(codecs.BOM_UTF8) if number == 1 else data


def _line_ends_are_carriage_returns(path: Path) -> bool:
    """Return whether the file's first bytes have carriage returns and no line feed, as old Macintosh programs write it.

    Raises:
        DamagedFileError: the file is a web page, which servers send in place of a file.
        ValueError: the file is UTF-16.
    """
    with opened(path) as stream:
        head = _read(stream, path, HEADER_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path.name} is UTF-16: save it as UTF-8")
    if head.removeprefix(codecs.BOM_UTF8).lstrip()[:20].lower().startswith(WEB_PAGE):
        raise DamagedFileError(path, "is a web page, not a data file")
    return b"\r" in head and b"\n" not in head


def opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file, plain or gzip, for reading its content."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else path.open("rb")


def _read(stream: gzip.GzipFile | io.BufferedReader, path: Path, size: int) -> bytes:
    try:
        return stream.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedFileError(path, f"is truncated or damaged: {error}") from error


def as_lines(text: str, number: int) -> pl.DataFrame:
    """Return the lines of `text` that are not blank, the first of which has `number`."""
    lines = pl.Series("_text", [text]).str.split("\n").explode().str.strip_suffix("\r")
    frame = pl.DataFrame([lines]).with_row_index("_line", offset=number)
    return frame.with_columns(pl.col("_line").cast(pl.Int64), pl.lit(None, pl.String).alias("_problem")).filter(
        pl.col("_text").str.strip_chars() != ""
    )


def count(data: bytes, text: str) -> int:
    """Return how often `text` occurs; for one character several times faster than bytes.count."""
    if len(text) > 1:
        return data.count(text.encode())
    found = np.frombuffer(data, dtype=np.uint8)
    step = 1 << 16  # stays in the cache
    return sum(int(np.count_nonzero(found[at : at + step] == ord(text))) for at in range(0, len(found), step))
