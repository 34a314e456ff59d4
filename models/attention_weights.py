"""Attention weights of a pass, for whoever wants to look at them; a pass that nobody looks at keeps none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_kept: list[Tensor] | None = None  # None: nobody looks


@contextmanager
def kept() -> Iterator[list[Tensor]]:
    """Yield a list that holds the weights (..., Q, L) of the last attention computed meanwhile."""
    global _kept
    before, _kept = _kept, []
    try:
        yield _kept
    finally:
        _kept = before


def keep(weight: Callable[[], Tensor]) -> None:
    """Take note of `weight`; it is computed only if somebody looks, as a fused kernel has no weights to show."""
    if _kept is not None:
        _kept[:] = [weight()]
