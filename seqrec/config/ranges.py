"""Ranges of settings, as annotations of field types; the checks and the documentation both read them."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Annotated, Any

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The range of a number."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __str__(self) -> str:
        parts = {"at least": self.ge, "more than": self.gt, "at most": self.le, "less than": self.lt}
        return " and ".join(f"{word} {limit}" for word, limit in parts.items() if limit is not None)

    def __contains__(self, value: float) -> bool:
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


class OrAuto:
    """Marks the type of a setting that may also be `auto`, which auto_settings.py replaces by a value."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_wrap_validator_function(_unless_auto, handler(source))

    def __str__(self) -> str:
        return f"or {AUTO}"


def _unless_auto(value: Any, validated: Any) -> Any:
    return value if isinstance(value, str) and value == AUTO else validated(value)


Count = Annotated[int, Bounds(ge=0)]
Positive = Annotated[int, Bounds(ge=1)]
Share = Annotated[float, Bounds(ge=0, le=1)]
Fraction = Annotated[float, Bounds(gt=0, lt=1)]
NotNegative = Annotated[float, Bounds(ge=0)]
PositiveReal = Annotated[float, Bounds(gt=0)]
ListLength = Annotated[int, Bounds(ge=1, le=100_000)]  # of recommendations
Minutes = Annotated[float, Bounds(gt=0, le=525_600)]  # a year at most
Port = Annotated[int, Bounds(ge=1, le=65_535)]
Seed = Annotated[int, Bounds(ge=0, lt=2**32)]  # accepted by numpy and torch


def may_be_auto(hint: Any) -> bool:
    """Return whether a setting of this type may be `auto`."""
    return any(isinstance(mark, OrAuto) for mark in typing.get_args(hint)[1:])
