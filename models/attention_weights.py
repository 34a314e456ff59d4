"""Records the attention weights of a forward pass on request; other passes record nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from seqrec.models.base import Batch, SequenceModel

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


def maps(model: SequenceModel, batch: Batch, last: bool = False) -> Tensor | None:
    """Return the weights (B, H, Q, L) of the last attention, in eval mode; None if its keys are not the events."""
    if not model.reads_events:
        return None
    with kept() as weights:
        model(batch, last)
    return weights[0].reshape(len(batch.items), -1, *weights[0].shape[-2:])
