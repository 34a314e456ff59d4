"""The FLOPs that SASRec needs on unpadded histories, as torch counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from seqrec.models import Batch, Catalogue
from seqrec.models.sasrec import SASRec

Work = Callable[[SASRec, Batch], object]


def training_flops(num_items: int, widths: Sequence[int], options: SASRec.Options) -> float:
    """Return the FLOPs of forward and backward pass and full softmax over a window of each of `widths`."""

    def step(model: SASRec, batch: Batch) -> None:
        logits = model(batch)[0] @ model.item_vectors()[1:].T
        F.cross_entropy(logits, batch.items[0] - 1).backward()

    return _total(step, num_items, widths, options)


def ranking_flops(num_items: int, widths: Sequence[int], options: SASRec.Options) -> float:
    """Return the FLOPs of scoring all items after a history of each of `widths`."""

    def score(model: SASRec, batch: Batch) -> None:
        with torch.no_grad():
            model(batch, last=True)[0] @ model.item_vectors()[1:].T

    return _total(score, num_items, widths, options)


def _total(work: Work, num_items: int, widths: Sequence[int], options: SASRec.Options) -> float:
    places = (1, options.length // 2, options.length)
    counts = [_counted(work, num_items, width, options) for width in places]
    # attention is quadratic in the width and all else linear, so three counts give every other one
    return float(np.polyval(np.polyfit(places, counts, 2), widths).sum())


def _counted(work: Work, num_items: int, width: int, options: SASRec.Options) -> int:
    with torch.device("meta"):  # nothing is computed
        model = SASRec(options, Catalogue(num_items, 1, options.length))
        batch = Batch(torch.ones(1, width).long(), torch.zeros(1, width), torch.ones(1).long())
        with FlopCounterMode(display=False) as counter:
            work(model, batch)
    return int(counter.get_total_flops())
