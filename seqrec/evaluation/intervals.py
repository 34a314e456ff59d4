"""Bootstrap intervals of a metric, and of the difference between two models on the same cases."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from seqrec.evaluation.metrics import FloatArray, ndcg


class Interval(NamedTuple):
    """An estimate and its confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap(
    value: FloatArray, user: NDArray[np.integer], *, confidence: float = 0.95, resamples: int, seed: int
) -> Interval:
    """Return the mean of `value` over cases, with a percentile interval from resampling users.

    Users are resampled rather than cases, because the cases of one user are not independent.
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
