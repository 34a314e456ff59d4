"""The FLOPs that a model needs on unpadded histories, as torch counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqrec.evaluation.cost import FlopCounter
from seqrec.models import Batch, Catalogue, SequenceModel

Kind = type[SequenceModel]
Work = Callable[[SequenceModel, Batch], object]


def training_flops(kind: Kind, num_items: int, widths: Sequence[int], options: SequenceModel.Options) -> float:
    """Return the FLOPs of forward and backward pass and full softmax over a window of each of `widths`."""

    def step(model: SequenceModel, batch: Batch) -> None:
        logits = model(batch)[0] @ model.item_vectors()[1:].T
        F.cross_entropy(logits, batch.items[0] - 1).backward()

    return _total(step, kind, num_items, widths, options)


def ranking_flops(kind: Kind, num_items: int, widths: Sequence[int], options: SequenceModel.Options) -> float:
    """Return the FLOPs of scoring all items after a history of each of `widths`."""

    def score(model: SequenceModel, batch: Batch) -> None:
        with torch.no_grad():
            model(batch, last=True)[0] @ model.item_vectors()[1:].T

    return _total(score, kind, num_items, widths, options)


def counted(work: Callable[[], object]) -> int:
    """Return the FLOPs of a call."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:  # other kernels compute some products twice
        work()
    return counter.flops


def _total(work: Work, kind: Kind, num_items: int, widths: Sequence[int], options: SequenceModel.Options) -> float:
    model = kind(options, Catalogue(num_items, 1, options.length))
    places = (1, options.length // 2, options.length)
    batches = [Batch(torch.ones(1, width).long(), torch.zeros(1, width), torch.ones(1).long()) for width in places]
    counts = [counted(partial(work, model, batch)) for batch in batches]
    # attention is quadratic in the width and all else linear, so three counts give every other one
    return float(np.polyval(np.polyfit(places, counts, 2), widths).sum())
