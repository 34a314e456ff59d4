"""Reads text files, plain or gzip, as blocks of whole lines, so that memory is bounded by the size of a block.

A frame of lines has the columns `MARKS`: `_line` (1-based), `_text` (the original record) and `_problem` (null if none
was found so far). Readers pass them on, and `row_checks` makes the quarantine from them.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import io
import logging
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

logger = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 24
HEADER_BYTES = 1 << 16
PIECE_BYTES, PIECES = 1 << 18, 32  # of an excerpt
LONGEST_LINE = 1 << 26  # bytes; a longer line means that the file is not text, and must not fill memory
MARKS = ("_line", "_text", "_problem")
PACKED = {  # first bytes -> what such a file is
    b"PK\x03\x04": "is a zip archive or an Excel file",
    b"BZh": "is compressed with bzip2",
    b"\xfd7zXZ": "is compressed with xz",
    b"(\xb5/\xfd": "is compressed with zstd",
}
WEB_PAGE = (b"<!doctype html", b"<html")

Frames = Iterator[pl.DataFrame]


class DamagedFileError(ValueError):
    """The file `path` is truncated or corrupt; fetching it again may help."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path.name} {reason}; fetch it again")
        self.path = path


def read_lines(path: Path, *, size: int = 0) -> Frames:
    """Yield the non-blank lines of a text file, plain or gzip.

    Text that is not UTF-8 is read as `decoded` says. `size` is the size of a block in bytes; 0: BLOCK_BYTES.

    Raises:
        DamagedFileError: the gzip stream is truncated or corrupt, or the file is a web page.
        ValueError: the file is not a text file.
    """
    for number, data in chunks(path, size):
        yield as_lines(decoded(data, path), number)


def chunks(path: Path, size: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines, each with the number of its first line; line ends become line feeds."""
    mac = _line_ends_are_carriage_returns(path)
    pending: list[bytes] = []  # parts of a line whose end has not been read; joined once
    number = 1
    with opened(path) as stream:
        left = sys.maxsize if isinstance(stream, gzip.GzipFile) else path.stat().st_size  # a log may grow for ever
        while chunk := _read(stream, path, min(left, size or BLOCK_BYTES)):
            left -= len(chunk)
            chunk = chunk.replace(b"\r", b"\n") if mac else chunk
            end = chunk.rfind(b"\n") + 1
            if end:
                whole = b"".join([*pending, chunk[:end]])
                pending = [chunk[end:]]
                yield number, _without_marker(whole, number)
                number += count(whole, "\n")
            else:
                pending.append(chunk)
                if (length := sum(map(len, pending))) > LONGEST_LINE:
                    raise ValueError(f"{path.name}: no line end in {length:,} bytes; this is not a text file")
    rest = _without_marker(b"".join(pending), number)
    if rest:
        yield number, rest


def excerpt(path: Path) -> bytes:
    """Return whole lines from the beginning, the end and places between them of a text file, unpacked.

    A small file is returned as a whole. A gzip file is decompressed as a whole, because its length is not known before.

    Raises:
        DamagedFileError: the gzip stream is truncated or corrupt.
    """
    pieces, size = [], path.stat().st_size
    with opened(path) as stream:
        if isinstance(stream, gzip.GzipFile):
            return b"".join(_spread(stream, path))
        for piece in range(PIECES):
            start = (size - PIECE_BYTES) * piece // (PIECES - 1)
            if stream.tell() < start:
                stream.seek(start)
                _read(stream, path, LONGEST_LINE, line=True)
            pieces += [_read(stream, path, PIECE_BYTES), _read(stream, path, LONGEST_LINE, line=True)]
    return b"".join(pieces)


def _spread(stream: gzip.GzipFile, path: Path) -> list[bytes]:
    """Return pieces of whole lines at equal distances, at least half of `PIECES` of a long stream, and the last one."""
    pieces: list[bytes] = []
    last, number, step = b"", 0, 1
    while piece := _read(stream, path, PIECE_BYTES):
        last = piece + _read(stream, path, LONGEST_LINE, line=True)
        if number % step == 0:
            pieces.append(last)
        if len(pieces) > PIECES:
            pieces, step = pieces[::2], 2 * step
        number += 1
    return pieces if (number - 1) % step == 0 else [*pieces, last]


def decoded(data: bytes, path: Path) -> str:
    """Return the text of whole lines of a file: UTF-8, or Windows-1252 in a line that is not UTF-8 at all.

    A line that also has characters of several UTF-8 bytes is damaged; what is not UTF-8 in it becomes U+FFFD.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\n".join(_decoded_line(line, path) for line in data.split(b"\n"))


def _decoded_line(line: bytes, path: Path) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        text = line.decode("utf-8", "replace")
    if not text.replace("\ufffd", "").isascii():
        return text
    _say_encoding(path.name)
    return line.decode("cp1252", "replace")


@functools.lru_cache(maxsize=32)
def _say_encoding(name: str) -> None:  # once for a file and its copy
    logger.warning("%s: lines that are not UTF-8 are read as Windows-1252", name)


def _without_marker(data: bytes, number: int) -> bytes:
    return data.removeprefix(codecs.BOM_UTF8) if number == 1 else data


def _line_ends_are_carriage_returns(path: Path) -> bool:
    """Return whether the file's first bytes have carriage returns but no line feed, as in old Macintosh files.

    Raises:
        DamagedFileError: the file is a web page, which servers may send instead of a file.
        ValueError: the file is UTF-16, or packed in another way than gzip.
    """
    with opened(path) as stream:
        head = _read(stream, path, HEADER_BYTES)
    for magic, what in PACKED.items():
        if head.startswith(magic):
            raise ValueError(f"{path.name} {what}: unpack or save it as text, gzip or Parquet")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path.name} is UTF-16: save it as UTF-8")
    if head.removeprefix(codecs.BOM_UTF8).lstrip()[:20].lower().startswith(WEB_PAGE):
        raise DamagedFileError(path, "is a web page, not a data file")
    return b"\r" in head and b"\n" not in head


def opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file, plain or gzip, for reading its decompressed content."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else path.open("rb")


def _read(stream: gzip.GzipFile | io.BufferedReader, path: Path, size: int, *, line: bool = False) -> bytes:
    try:
        return stream.readline(size) if line else stream.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedFileError(path, f"is truncated or damaged: {error}") from error


def as_lines(text: str, number: int) -> pl.DataFrame:
    """Return the non-blank lines of `text` with their line numbers; the first line is line `number`."""
    lines = pl.Series("_text", [text]).str.split("\n").explode().str.strip_suffix("\r")
    return marked(pl.DataFrame([lines]), pl.col("_text"), number).filter(pl.col("_text").str.strip_chars() != "")


def marked(frame: pl.DataFrame, text: pl.Expr, first: int) -> pl.DataFrame:
    """Return a frame with the columns `MARKS`; its rows have the original record `text`, and numbers from `first`."""
    return frame.with_row_index("_line", offset=first).with_columns(
        pl.col("_line").cast(pl.Int64), text.alias("_text"), pl.lit(None, pl.String).alias("_problem")
    )


def count(data: bytes, text: str) -> int:
    """Return the number of occurrences of `text`; for one character, several times faster than bytes.count."""
    if len(text) > 1:
        return data.count(text.encode())
    found = np.frombuffer(data, dtype=np.uint8)
    step = 1 << 16  # small enough for the cache
    return sum(int(np.count_nonzero(found[at : at + step] == ord(text))) for at in range(0, len(found), step))
