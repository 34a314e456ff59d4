"""Top-K dropout: drops some of each query's largest attention weights (FLASH4Rec, 2023 preprint, eqs. 12 to 14).

Eq. 14 divides by the dropped mass. Inverted dropout requires the kept mass, which is used here.

Shape suffixes, besides those of base.py: K candidates of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def topk_dropout(weight_BLL: Tensor, real_BL: Tensor, k: int, p: float, scope: str) -> Tensor:
    """Drop each of a row's `k` largest weights with probability `p`, and rescale the others (eqs. 12-14).

    Args:
        weight_BLL: attention weights after the softmax.
        real_BL: queries that are not padding; padded rows are left out of all sums.
        k: number of candidates for dropping in each row.
        p: probability of dropping a candidate.
        scope: `matrix` rescales each example by one factor, `row` each row.
    """
    if p == 0:
        return weight_BLL
    with torch.no_grad():  # the mask is a constant (the paper's gradient block)
        wide = torch.promote_types(weight_BLL.dtype, torch.float32)  # in bf16, the difference of sums has no digits
        top_BLK, index_BLK = weight_BLL.topk(min(k, weight_BLL.shape[-1]), dim=-1)
        kept_BLK = torch.rand_like(top_BLK, dtype=wide) >= p
        mass_BL1 = weight_BLL.sum(-1, keepdim=True, dtype=wide) * real_BL.unsqueeze(-1)
        dropped_BL1 = (top_BLK * ~kept_BLK).sum(-1, keepdim=True, dtype=wide) * real_BL.unsqueeze(-1)
        if scope == "matrix":
            mass_BL1, dropped_BL1 = mass_BL1.sum(1, keepdim=True), dropped_BL1.sum(1, keepdim=True)
        factor_BL1 = (mass_BL1 / (mass_BL1 - dropped_BL1).clamp(min=1e-6)).to(weight_BLL.dtype)
        mask_BLL = factor_BL1.expand_as(weight_BLL).clone()
        mask_BLL.scatter_(-1, index_BLK, kept_BLK * factor_BL1)
    return weight_BLL * mask_BLL
