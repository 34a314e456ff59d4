"""Costs of a model that do not depend on the machine."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from seqrec.models.base import Batch, SequenceModel


def table_parameters(model: SequenceModel) -> int:
    """Return the number of parameters in embedding tables, which grow with the catalogue."""
    return sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding))


@torch.no_grad()
def query_flops(model: SequenceModel) -> int:
    """Return the floating-point operations of one query, for a history that fills the window.

    Matrix products and convolutions are counted, a multiplication and an addition as two operations. Element-wise
    operations, such as a normalisation or a scan, are not counted, and neither is scoring the items.

    Args:
        model: on the CPU, in eval mode; the fused kernels of an accelerator would not be counted.
    """
    length = model.options.history
    items_1L = torch.arange(length).remainder(model.catalogue.num_items).add(1).unsqueeze(0)
    times_1L = torch.arange(1 - length, 1, dtype=torch.float64).unsqueeze(0)
    batch = model.asked(Batch(items_1L, times_1L, torch.zeros(1, dtype=torch.int64)))
    experts = {torch.ops.aten._grouped_mm: grouped_flops}  # torch has no formula of its own
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=experts) as counter:
        model(batch, last=True)
    return int(counter.get_total_flops())


def grouped_flops(left: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    """Return the operations of a product of grouped rows (N, D) with one matrix (D, E) for each group."""
    return 2 * left[0] * left[1] * right[-1]
