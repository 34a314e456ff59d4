"""Files with a JSON object or a Python literal per line."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl

from seqrec.data.readers.blocks import Frames, read_lines

SURROGATE = re.compile("[\ud800-\udfff]")
FIRST_BYTES = 1 << 22  # in which each key is looked for


def keys(path: Path) -> list[str]:
    """Return the keys of the first objects of a file with an object per line; none if the file is no such file.

    They are read once for each state of the file, of which several readers ask for them.

    `user.id` is the key `id` of the object `user`. Keys with nothing but lists, or objects in objects, are left out.

    Raises:
        ValueError: the file is one JSON array, or an object spans several lines.
    """
    state = path.stat()
    return list(_keys(path, state.st_size, state.st_mtime_ns))


@functools.lru_cache(maxsize=8)
def _keys(path: Path, *_: int) -> tuple[str, ...]:
    lines = next((lines for lines in read_lines(path, size=FIRST_BYTES) if not lines.is_empty()), None)
    first = "" if lines is None else lines["_text"][0].strip()
    if first == "[" or first.startswith("[{"):
        raise ValueError(
            f"{path.name} is one JSON array: write an object per line instead, without brackets around them"
        )
    if lines is None or not first.startswith("{"):
        return ()
    objects = [value for text in lines["_text"] if isinstance(value := _object_or_none(text), dict)]
    if not objects:
        raise ValueError(f"{path.name}: no line is a JSON object: write each object on a line of its own")
    flat = [_flattened(value) for value in objects]
    nested = {key for value in (*objects, *flat) for key in value if isinstance(value[key], (list, dict))}
    single = {key for value in flat for key in value if not isinstance(value[key], (list, dict, type(None)))}
    names = dict.fromkeys(key for value in flat for key in value)
    found = tuple(key for key in names if key in single or key not in nested)
    if names and not found:
        raise ValueError(
            f"{path.name}: the objects have only lists and objects in objects, which are not read: write user, item "
            "and time to keys of their own"
        )
    return found


def _flattened(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object with the keys of its objects in place of these: `user.id`."""
    found: dict[str, Any] = {}
    for key, part in value.items():
        found |= {f"{key}.{name}": inner for name, inner in part.items()} if isinstance(part, dict) else {key: part}
    return found


def _object_or_none(text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        try:  # faster than `suppress`, which a large file enters for every line
            return parse(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # too deep, or numbers too long
            continue
    return None


def json_lines(path: Path, fields: Mapping[str, Any]) -> Frames:
    """Yield the objects of a file with a JSON object, or a Python literal, per line; missing keys are null.

    `fields` maps the keys of `keys` to polars types.
    """
    for lines in read_lines(path):
        values = _decoded(lines["_text"], fields)
        if values is not None:
            yield lines.with_columns(values.struct.unnest())
        else:  # at least one line is not a JSON object of these types; find it
            rows = [_parsed(text, fields) for text in lines["_text"]]
            schema = {"_problem": pl.String, **fields}
            yield lines.drop("_problem").hstack(pl.DataFrame(rows, schema=schema, orient="row", strict=False))


def texts_of(path: Path, names: Mapping[str, str]) -> Frames:
    """Yield the objects of `json_lines` with text under our names; `names` maps the file's keys to them."""
    for frame in json_lines(path, dict.fromkeys(names, pl.String)):
        yield frame.rename(names)


def _decoded(texts: pl.Series, fields: Mapping[str, Any]) -> pl.Series | None:
    inner = {name: name.split(".", 1) for name in fields if "." in name}
    objects: dict[str, dict[str, Any]] = {}
    for name, (key, part) in inner.items():
        objects.setdefault(key, {})[part] = fields[name]
    kinds = {**{key: pl.Struct(parts) for key, parts in objects.items()}, **fields}
    try:
        values = texts.str.json_decode(pl.Struct(kinds))
        if inner:  # `user.id` may also be one key
            parts = {name: pl.col(key).struct.field(part) for name, (key, part) in inner.items()}
            columns = [pl.coalesce(name, parts[name]).alias(name) if name in parts else pl.col(name) for name in fields]
            values = values.struct.unnest().select(columns).to_struct()
    except pl.exceptions.PolarsError:
        return None
    # polars reads a lone surrogate as NUL
    unclear = any(
        values.struct.field(name).str.contains("\x00", literal=True).any()
        for name, kind in fields.items()
        if kind == pl.String
    )
    return values if len(values) == len(texts) and not unclear else None


def _parsed(text: str, fields: Mapping[str, Any]) -> list[Any]:
    value = _object_or_none(text)
    if not isinstance(value, dict):
        return ["not a JSON object or Python literal", *[None] * len(fields)]
    value = value | _flattened(value)
    return [None, *(_as_strings(value.get(name), kind) for name, kind in fields.items())]


def _as_strings(value: Any, kind: Any) -> Any:
    if isinstance(kind, pl.List):
        return [_as_strings(part, kind.inner) for part in value] if isinstance(value, list) else None
    if value is None or isinstance(value, (list, dict)):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):  # as `_decoded` writes numbers: 1 for 1.0, no exponents
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    # A lone surrogate is valid JSON but not valid text; `row_checks` reports U+FFFD in an id.
    return SURROGATE.sub("\ufffd", str(value))
