"""Ranking metrics, computed from ranks only.

Ranks start at 1 and count ties half: 1 + #greater + #equal others / 2, so that a constant scorer looks bad rather than
perfect. Means over cases are computed from the integer histogram of 2 * rank, so they do not depend on block size or
number of processes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # torch takes seconds to import, and `leaderboard` needs none of it
    from torch import Tensor

SELECTION = "valid/ndcg@10"  # test metrics are reported but select nothing
TEST = "test/ndcg@10"
CUTOFFS = (1, 5, 10, 20)
SHARES = re.compile(r"(^|/)(ndcg|recall|mrr|coverage|gini|tail_share|accuracy)(@\d+)?($|/)")  # metrics in [0, 1]
FloatArray = NDArray[np.float64]


def require_possible(values: Mapping[str, float], name: str) -> None:
    """Raise ValueError if a value is not finite, or if a share or accuracy is outside [0, 1] by more than rounding.

    The names of `values` are as in metrics.json: `test/ndcg@10`, `valid/mrr`, `test/ndcg@10/low`, `test/cases`.
    """
    wrong = [
        f"{metric} {value}"
        for metric, value in values.items()
        if not math.isfinite(value) or (SHARES.search(metric) and not -1e-9 <= value <= 1 + 1e-9)
    ]
    if wrong:
        raise ValueError(f"{name} has impossible metrics, so none are written: {', '.join(wrong)}")


def histogram(rank: Tensor, num_items: int) -> Tensor:
    """Return the histogram (2 * num_items + 1,) of 2 * rank; those of blocks and processes can be summed."""
    import torch

    return torch.bincount((2 * rank).round().long(), minlength=2 * num_items + 1)


def from_histogram(count_R: Tensor) -> dict[str, float]:
    """Return NDCG, Recall and MRR at each cut-off, and MRR over the full ranking, as means over cases.

    Each case has one relevant item. With its rank r: Recall@K = [r <= K], NDCG@K = [r <= K] / log2(r + 1),
    MRR@K = [r <= K] / r. Recall@K is also called the hit rate.
    """
    import torch

    count = count_R.double().cpu()
    rank = torch.arange(len(count), dtype=torch.float64) / 2
    total = count.sum().clamp(min=1)
    present = count > 0
    gain = torch.where(present, 1 / torch.log2(rank + 1), 0.0) * count / total
    reciprocal = torch.where(present, 1 / rank, 0.0) * count / total
    values = {}
    for k in CUTOFFS:
        values[f"ndcg@{k}"] = gain[rank <= k].sum().item()
        values[f"recall@{k}"] = ((count / total)[rank <= k]).sum().item()
        values[f"mrr@{k}"] = reciprocal[rank <= k].sum().item()
    return values | {"mrr": reciprocal.sum().item()}


def ndcg(rank: FloatArray, k: int) -> FloatArray:
    """Return NDCG@k of each case."""
    return np.where(rank <= k, 1 / np.log2(rank + 1), 0.0)


def list_metrics(items_UK: Tensor, count_V: Tensor) -> dict[str, float]:
    """Return beyond-accuracy metrics of recommendation lists.

    Args:
        items_UK: recommended items of each user; 0 where a list is shorter.
        count_V: training events of each item; entry 0 (padding) is not used.

    Returns:
        coverage: share of the catalogue that is recommended to at least one user;
        gini: inequality of exposure over the catalogue, from 0 (equal) towards 1 (one item only);
        mean_popularity: mean number of training events of the recommended items;
        tail_share: share of recommendations outside the most popular fifth of the catalogue;
        novelty: mean self-information -log2 p(item) in bits, with p from training counts plus one.
    """
    import torch

    shown = items_UK[items_UK > 0].cpu()
    count = count_V.cpu().double()
    num_items = len(count) - 1
    exposure = torch.bincount(shown, minlength=num_items + 1)[1:].double()
    ordered = exposure.sort().values
    order = torch.arange(1, num_items + 1, dtype=torch.float64)
    total = exposure.sum().clamp(min=1)
    information = -torch.log2((count + 1) / (count[1:].sum() + num_items))
    return {
        "coverage": (exposure > 0).double().mean().item(),
        "gini": ((2 * order - num_items - 1) * ordered).sum().item() / (num_items * total.item()),
        "mean_popularity": count[shown].mean().item() if len(shown) else 0.0,
        "tail_share": exposure[~head_items(count_V)[1:].cpu()].sum().item() / total.item(),
        "novelty": information[shown].mean().item() if len(shown) else 0.0,
    }


def head_items(count_V: Tensor) -> Tensor:
    """Return bool (V,): the most popular fifth of the catalogue; ties are broken by vocabulary order."""
    import torch

    num_items = len(count_V) - 1
    head = torch.zeros(len(count_V), dtype=torch.bool, device=count_V.device)
    best = count_V[1:].argsort(descending=True, stable=True)[: max(1, round(0.2 * num_items))]
    head[best + 1] = True
    return head
