"""Converts mappings into sections: checks keys, types and ranges; every error message names the key at fault."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from seqrec.config.ranges import AUTO, Bounds, may_be_auto
from seqrec.redaction import is_secret_name, redacted, secret_settings

# Without pydantic, as on a minimal training machine, keys, types and ranges are still checked, but not converted.
CASTS = importlib.util.find_spec("pydantic") is not None
if CASTS:
    import pydantic

T = TypeVar("T")
MOVED = {  # key -> where the setting is, if it was written in a section that does not have it
    "filter_seen": "it is a key of the top level, or of a dataset's entry",
    "refit": "set evaluate.refit, which applies to all rows of a leaderboard",
}
REPLACEMENTS = {  # setting -> where to put its credentials
    "mirror": "SEQREC_DATA_MIRROR",
    "interactions": "SEQREC_DATA_MIRROR",
    "items": "SEQREC_DATA_MIRROR",
    "repository": "a credential helper of git",
    "tracking_uri": "MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD,",
}


class ConfigError(ValueError):
    """A setting is missing, misspelt, of the wrong type or out of range; the message names its key."""


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


STORES = ("s3", "gs", "az", "file")  # schemes of addresses in object stores; see seqrec/data/stores.py


def check_address(key: str, place: str, schemes: Sequence[str] = STORES) -> None:
    """Raise `ValueError` if `place` is an address, not a path, with a scheme that is none of `schemes`."""
    scheme, separator, _ = place.partition("://")
    known = ", ".join(f"{one}://" for one in schemes)
    require(not separator or scheme in schemes, f"{key} must be a path or begin with one of {known}; not {scheme}://")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of params.yaml; its constructor checks each value against the type and `Bounds` of its field."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # for a section inside another; `parse` checks the outer keys

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(section: Any) -> None:
    """Check the numbers, strings and choices of a dataclass against its type hints.

    Raises:
        ValueError: the message names the field.
    """
    for name, hint in _hints(section.__class__).items():
        check_value(name, hint, getattr(section, name))


def check_value(name: str, hint: Any, value: Any) -> None:
    """Check a number, string or choice against its type and `Bounds`.

    Raises:
        ValueError: the message starts with `name`.
    """
    kind, choices, limits, or_auto = _read(hint)
    if or_auto and isinstance(value, str) and value == AUTO:
        return
    if choices:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r:.80}")
    elif kind in (bool, int, float, str):
        fits = isinstance(value, bool) if kind is bool else not isinstance(value, bool)
        if not fits or not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r:.80}")
    if kind in (int, float) and not (math.isfinite(value) and (kind is float or abs(value) < 2**63)):
        raise ValueError(f"{name} must be a finite number, not {value!r:.80}")
    for limit in limits:
        if value not in limit:
            raise ValueError(f"{name} must be {limit}, not {value!r:.80}")


@functools.cache
def _read(hint: Any) -> tuple[Any, tuple[Any, ...], tuple[Bounds, ...], bool]:
    """Return the type in a hint, the choices of a Literal, the bounds, and whether the value may be `auto`."""
    kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    return kind, choices, tuple(mark for mark in marks if isinstance(mark, Bounds)), may_be_auto(hint)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def parse(cls: type[T], values: Mapping[str, Any], path: str) -> T:
    """Build the dataclass `cls` from `values`; error messages start with the key `path`.

    Raises:
        ConfigError: unknown key, missing key, wrong type or value out of range.
    """
    check_keys(values, [f.name for f in dataclasses.fields(cls)], path)  # type: ignore[arg-type]
    refuse_secrets(values, path)
    try:
        for name, hint in _hints(cast(type, cls)).items():  # pydantic would turn true into 1
            if isinstance(values.get(name), bool):
                check_value(name, hint, values[name])
        parsed: T = _adapter(cast(type, cls)).validate_python(dict(values)) if CASTS else cls(**_tuples(values))
        if not isinstance(parsed, Section):  # such as a model's options
            check_fields(parsed)
    except ValueError as error:  # pydantic's ValidationError is one
        raise ConfigError(_explain(error, path, cast(type, cls))) from error
    except (TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return parsed


@functools.cache
def _adapter(cls: type) -> Any:
    return pydantic.TypeAdapter(cls)


def _explain(error: ValueError, path: str, cls: type) -> str:
    if not CASTS or not isinstance(error, pydantic.ValidationError):
        return f"{path}: {error}" if path else str(error)
    lines = []
    for detail in error.errors():
        key = ".".join(part for part in (path, *map(str, detail["loc"])) if part)
        message = detail["msg"].removeprefix("Value error, ")
        if detail["loc"] and _takes_auto(cls, str(detail["loc"][0])):
            message += f", or {AUTO}"
        own = isinstance(detail.get("ctx", {}).get("error"), ValueError)  # raised by a section; it includes the value
        shown = not own and not is_secret_name(key)
        label = f"{key}: " if key else ""
        lines.append(f"{label}{message}" + (f" (got {redacted(repr(detail['input'])):.80})" if shown else ""))
    return "; ".join(lines)


def _takes_auto(cls: type, name: str) -> bool:
    """Return whether setting `name` may be `auto`; a section may name in `ruled` those of the marked ones that may."""
    return may_be_auto(_hints(cls).get(name)) and name in getattr(cls, "ruled", (name,))


def refuse_secrets(values: Any, path: str) -> None:
    """Raise ConfigError if a setting holds a secret; settings are written to dvc.lock, pipelines and reports."""
    try:
        found = list(secret_settings(values, path))
    except RecursionError as error:  # a YAML anchor that contains itself
        raise ConfigError(f"{path or 'top level'}: the settings contain themselves") from error
    for key in found:
        instead = REPLACEMENTS.get(key.rpartition(".")[2], "kubernetes.secrets" if "environment." in key else "")
        hint = f"; use {instead} instead" if instead else ""
        raise ConfigError(f"{key}: put credentials into the environment, not into the settings{hint}")


def check_keys(values: Any, known: Any, path: str) -> None:
    """Raise ConfigError unless `values` is a mapping whose keys are all in `known`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'top level'}: expected a mapping of settings, got {redacted(repr(values)):.80}")
    for key in values:
        if key not in known:
            where = f"{path}.{key}" if path else f"{key}"
            names = [*map(str, known)]
            moved = f"; {MOVED[key]}" if key in MOVED and where != key else ""
            hint = moved or suggestion(str(key), names)
            raise ConfigError(f"{where:.200}: unknown key{hint}")


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all of them where none is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
