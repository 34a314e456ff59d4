"""Reads Parquet files with columns of any type, in batches."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seqrec.data.readers.blocks import PIECES, DamagedFileError, Frames, marked
from seqrec.data.readers.times import DAY_S, PER_SECOND

BATCH_ROWS = 1 << 20
PIECE_ROWS = 250  # of an excerpt
YEARS_1_TO_9999 = (-62_135_596_800, 253_402_300_799)  # seconds since 1970; outside, polars panics when formatting dates
OURS = ("user_id", "item_id", "timestamp", "rating")  # columns that must hold single values, not lists or structs


def is_parquet(path: Path) -> bool:
    """Return whether the file begins with the magic bytes of Parquet."""
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def names(path: Path) -> list[str]:
    """Return the column names.

    Raises:
        DamagedFileError: the file is truncated or damaged.
    """
    return list(_opened(path).schema_arrow.names)


def frames(path: Path, chosen: Mapping[str, str], plain: Sequence[str]) -> Frames:
    """Yield the chosen columns (our name -> the file's) as text, numbers, dates or, for attributes, lists of text.

    Raises:
        DamagedFileError: the file is truncated or damaged.
        ValueError: a column that is named in `plain` holds lists, structs or maps.
    """
    file, number = _opened(path), 1
    for name, column in chosen.items():
        kind = file.schema_arrow.field(column).type
        if name in plain and pa.types.is_nested(kind):
            raise ValueError(f"{path.name}: column {column!r} holds {kind}, not one {name} in each row")
    try:
        for batch in file.iter_batches(BATCH_ROWS, columns=sorted(set(chosen.values()))):
            yield _frame(batch, chosen, number)
            number += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def single(path: Path) -> list[str]:
    """Return the names of the columns that hold single values, not lists or structs."""
    return [field.name for field in _opened(path).schema_arrow if not pa.types.is_nested(field.type)]


def excerpt(path: Path, chosen: Mapping[str, str]) -> Frames:
    """Yield columns as `frames` does, but only some rows from places all over the file.

    Raises:
        DamagedFileError: the file is truncated or damaged.
    """
    file = _opened(path)
    rows, groups = file.metadata.num_rows, file.num_row_groups
    size = max(PIECE_ROWS, min(rows // PIECES, BATCH_ROWS // PIECES))
    try:
        for group in np.linspace(0, groups - 1, min(PIECES, groups), dtype=int).tolist():
            batches = file.iter_batches(size, row_groups=[group])
            for batch in batches if groups < PIECES else islice(batches, 1):
                yield _frame(batch.take(np.arange(min(PIECE_ROWS, len(batch)))), chosen, 1)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _frame(batch: pa.RecordBatch, chosen: Mapping[str, str], number: int) -> pl.DataFrame:
    columns = {name: _series(batch.column(column)) for name, column in chosen.items()}
    readable = [name for name, series in columns.items() if not series.dtype.is_nested()]
    return marked(pl.DataFrame(columns), pl.concat_str(readable, separator=",", ignore_nulls=True), number)


def _series(values: pa.Array) -> pl.Series:
    """Return a column; types other than text, number, date and list become text."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.dictionary_decode(), kind.value_type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return _dates(values)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _polars(values.cast(pa.float32()) if pa.types.is_float16(kind) else values)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _from_bytes(values)
    if pa.types.is_null(kind):
        return pl.Series([None] * len(values), dtype=pl.String)
    return _as_text(values)


def _dates(values: pa.Array) -> pl.Series:
    """Return dates, and times in UTC; null for years without four digits."""
    kind = values.type
    if pa.types.is_timestamp(kind):
        values = values.cast(pa.timestamp(kind.unit))
    raw = values.view(pa.int32() if pa.types.is_date32(kind) else pa.int64()).cast(pa.int64())
    low, high = YEARS_1_TO_9999
    if pa.types.is_date32(kind):
        low, high = low // DAY_S, high // DAY_S
    else:
        scale = PER_SECOND[kind.unit] if pa.types.is_timestamp(kind) else PER_SECOND["ms"]
        low, high = max(low * scale, -(2**63)), min(high * scale, 2**63 - 1)
    known = pc.and_(pc.greater_equal(raw, low), pc.less_equal(raw, high))
    return _polars(pc.if_else(known, values, pa.scalar(None, values.type)))


def _polars(values: pa.Array) -> pl.Series:
    series = pl.from_arrow(values)
    assert isinstance(series, pl.Series)
    return series


def _from_bytes(values: pa.Array) -> pl.Series:
    """Return text; bytes that are not valid UTF-8 become U+FFFD."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return _as_text(values.cast(pa.binary()))
    return _polars(values)


def _as_text(values: pa.Array) -> pl.Series:
    found: list[Any] = values.to_pylist()
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        lists = [None if value is None else [_text(part) for part in value] for value in found]
        return pl.Series(lists, dtype=pl.List(pl.String))
    if _are_uuids(found):
        found = [None if value is None else uuid.UUID(bytes=value) for value in found]
    return pl.Series([_text(value) for value in found], dtype=pl.String)


def _are_uuids(values: list[Any]) -> bool:
    """Return whether values are UUIDs as bytes: 16 bytes each that are not all of them text."""
    known = [value for value in values if value is not None]
    if not all(isinstance(value, bytes) and len(value) == 16 for value in known):
        return False
    try:
        b"".join(known).decode()
    except UnicodeDecodeError:
        return True
    return False


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return json.dumps(value, default=str) if isinstance(value, dict | list | tuple) else str(value)


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DamagedFileError:
    reason = str(error).partition("\n")[0]
    return DamagedFileError(path, f"is truncated or damaged: {reason:.200}")
