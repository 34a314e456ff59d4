"""Records the attention weights of a forward pass on request; other passes record nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_kept: list[Tensor] | None = None  # None: not recording


@contextmanager
def kept() -> Iterator[list[Tensor]]:
    """Yield a list that receives the weights (..., Q, L) of the last attention computed in the block."""
    global _kept
    before, _kept = _kept, []
    try:
        yield _kept
    finally:
        _kept = before


def keep(weight: Callable[[], Tensor]) -> None:
    """Record `weight`, which is computed only on request, because fused kernels do not return weights."""
    if _kept is not None:
        _kept[:] = [weight()]
