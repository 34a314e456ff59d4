"""What a model costs on any machine."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.base import Batch, SequenceModel


def table_parameters(model: SequenceModel) -> int:
    """Return how many of the parameters are in embedding tables; they grow with the catalogue."""
    return sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding))


@torch.no_grad()
def query_flops(model: SequenceModel) -> int:
    """Return the floating-point operations of the query of one history that fills the window.

    Those of products of matrices and convolutions: a multiplication and an addition are two. What goes element by
    element, such as a normalisation or a scan, is not counted, nor are the scores of the items.

    Args:
        model: on the CPU, in eval mode: fused kernels of an accelerator are not counted.
    """
    length = model.options.history
    items_1L = torch.arange(length).remainder(model.catalogue.num_items).add(1).unsqueeze(0)
    times_1L = torch.arange(1 - length, 1, dtype=torch.float64).unsqueeze(0)
    batch = model.asked(Batch(items_1L, times_1L, torch.zeros(1, dtype=torch.int64)))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch, last=True)
    return int(counter.get_total_flops())
