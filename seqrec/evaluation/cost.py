"""Costs of a model that do not depend on the machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from seqrec.models.base import Batch, SequenceModel


def table_parameters(model: SequenceModel) -> int:
    """Return the number of parameters in embedding tables, which grow with the catalogue."""
    return sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding))


@torch.no_grad()
def query_flops(model: SequenceModel) -> int:
    """Return the floating-point operations of one query, for a history that fills the window.

    Matrix products and convolutions are counted, a multiplication and an addition as two operations. Element-wise
    operations, such as a normalisation or a scan, are not counted, and neither is scoring the items. The model must be
    on the CPU, in eval mode: the fused kernels of an accelerator would not be counted.
    """
    length = model.options.history
    items_1L = torch.arange(length).remainder(model.catalogue.num_items).add(1).unsqueeze(0)
    times_1L = torch.arange(1 - length, 1, dtype=torch.float64).unsqueeze(0)
    batch = model.asked(Batch(items_1L, times_1L, torch.zeros(1, dtype=torch.int64)))
    with sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:
        model(batch, last=True)
    return int(counter.flops)


class FlopCounter(TorchDispatchMode):
    """Counts FLOPs; torch's own mode also follows the modules, and fails where a loss takes gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        aten, known = torch.ops.aten, flop_counter.flop_registry
        self.flops = 0
        self.formulas = {
            **known,
            aten._scaled_dot_product_flash_attention_for_cpu: known[aten._scaled_dot_product_flash_attention],
            aten._scaled_dot_product_flash_attention_for_cpu_backward: known[
                aten._scaled_dot_product_flash_attention_backward
            ],
            aten._grouped_mm: flop_counter.shape_wrapper(grouped_flops),  # torch has none
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self.formulas.get(func._overloadpacket)
        self.flops += formula(*args, **(kwargs or {}), out_val=out) if formula else 0
        return out


def grouped_flops(left: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    """Return the operations of a product of grouped rows (N, D) with one matrix (D, E) for each group."""
    return 2 * left[0] * left[1] * right[-1]
