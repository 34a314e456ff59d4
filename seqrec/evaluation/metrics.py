"""Ranking metrics, computed from ranks alone, and their uncertainty.

A rank is 1-based and counts ties half: 1 + #greater + #equal others / 2, so a constant scorer looks bad, not
perfect. Means over cases are functions of the integer histogram of 2 * rank, hence the same for any block size and
any number of processes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

CUTOFFS = (1, 5, 10, 20)
FloatArray = NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate and its confidence interval."""

    mean: float
    low: float
    high: float


def histogram(rank: Tensor, num_items: int) -> Tensor:
    """Return the counts (2 * num_items + 1,) of 2 * rank; histograms of blocks and processes add up."""
    return torch.bincount((2 * rank).round().long(), minlength=2 * num_items + 1)


def from_histogram(count_R: Tensor) -> dict[str, float]:
    """Return the mean over cases of NDCG, Recall and MRR at each cut-off, and of MRR over the full ranking.

    One item is relevant, so with its rank r: Recall@K = [r <= K], NDCG@K = [r <= K] / log2(r + 1),
    MRR@K = [r <= K] / r. Recall@K is also called the hit rate.
    """
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


def bootstrap(
    value: FloatArray, user: NDArray[np.integer], *, confidence: float = 0.95, resamples: int, seed: int
) -> Interval:
    """Return the mean of `value` over cases with a percentile interval from resampling users.

    Users, not cases, are drawn: the cases of one user are not independent.
    """
    if len(value) == 0:
        return Interval(0.0, 0.0, 0.0)
    _, index = np.unique(user, return_inverse=True)
    sums, cases = np.bincount(index, weights=value), np.bincount(index)
    users = len(sums)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, 4_000_000 // users)  # bounds the memory of one draw
    for start in range(0, resamples, step):
        drawn = generator.integers(0, users, size=(min(step, resamples - start), users))
        means[start : start + step] = sums[drawn].sum(1) / cases[drawn].sum(1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(value.mean()), float(low), float(high))


def paired_gain(
    cases: pa.Table,
    other: pa.Table,
    *,
    split: str = "valid",
    k: int = 10,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int,
) -> Interval:
    """Return the mean NDCG@k of `cases` minus that of `other` on the same targets, with a paired interval.

    Raises:
        ValueError: the two tables (artifacts.CASES_SCHEMA) do not hold the same cases.
    """
    ours, theirs = aligned(cases, other, split)
    difference = ndcg(ours["rank"], k) - ndcg(theirs["rank"], k)
    return bootstrap(difference, ours["user"], confidence=confidence, resamples=resamples, seed=seed)


def aligned(cases: pa.Table, other: pa.Table, split: str) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return the columns of both tables for `split`, ordered by user and position.

    Raises:
        ValueError: the two tables (artifacts.CASES_SCHEMA) do not hold the same cases.
    """
    ours, theirs = (_sorted_split(table, split) for table in (cases, other))
    for column in ("user", "position", "target"):
        if not np.array_equal(ours[column], theirs[column]):
            raise ValueError("the two runs were evaluated on different cases: compare runs of one split only")
    return ours, theirs


def _sorted_split(cases: pa.Table, split: str) -> dict[str, NDArray[Any]]:
    columns = {name: cases[name].to_numpy() for name in ("split", "user", "position", "target", "rank")}
    chosen = np.flatnonzero(columns.pop("split") == split)
    chosen = chosen[np.lexsort((columns["position"][chosen], columns["user"][chosen]))]
    return {name: column[chosen] for name, column in columns.items()}


def list_metrics(items_UK: Tensor, count_V: Tensor) -> dict[str, float]:
    """Return beyond-accuracy metrics of recommendation lists.

    Args:
        items_UK: recommended items of each user; 0 where a list is shorter.
        count_V: events of each item in train, entry 0 (padding) unused.

    Returns:
        coverage: share of the catalogue that is recommended to anybody;
        gini: inequality of exposure over the catalogue, 0 = equal, towards 1 = one item takes all;
        mean_popularity: mean train count of the recommended items;
        tail_share: share of recommendations outside the fifth of the catalogue with the most train events;
        novelty: mean self-information -log2 p(item) in bits, p from train counts with one event added to each.
    """
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
        "tail_share": 1 - exposure[head_items(count_V)[1:].cpu()].sum().item() / total.item(),
        "novelty": information[shown].mean().item() if len(shown) else 0.0,
    }


def head_items(count_V: Tensor) -> Tensor:
    """Return (V,) bool: the most popular fifth of the catalogue; equal counts are taken in vocabulary order."""
    num_items = len(count_V) - 1
    head = torch.zeros(len(count_V), dtype=torch.bool, device=count_V.device)
    best = count_V[1:].argsort(descending=True, stable=True)[: max(1, round(0.2 * num_items))]
    head[best + 1] = True
    return head
