"""Confidence intervals of a metric, and of the difference between two models on the same cases."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from seqrec.evaluation.metrics import FloatArray, ndcg

RESAMPLES = 1000  # of the users, for an interval; the stage evaluate has a setting for it


class Interval(NamedTuple):
    """An estimate and its confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return a gain as text: +0.0123 [+0.0045, +0.0201]."""
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def bootstrap(
    value: FloatArray,
    user: NDArray[np.integer],
    *,
    confidence: float = 0.95,
    resamples: int,
    seed: int,
    difference: bool = False,
) -> Interval:
    """Return the mean of `value` over cases, with an interval that also holds for few users and many zeros.

    Two intervals are computed, and the wider end of both is returned. The BCa interval corrects the percentiles of
    resampled means for bias and skewness (Efron 1987); its level is widened for small samples (Hesterberg 2015).
    Student's t interval is safer for differences of which few are not 0. For shares it counts one more case with the
    lowest or highest value, because a few cases may all happen to have 0. With many users both are the same.

    Users are resampled rather than cases, because the cases of one user are not independent. The values are shares, or
    differences of shares: with `difference`, or if one of them is negative.
    """
    if len(value) == 0:
        return Interval(0.0, 0.0, 0.0)
    difference = difference or bool((value < 0).any())
    least, most = min(-1.0 if difference else 0.0, float(value.min())), max(1.0, float(value.max()))
    _, index = np.unique(user, return_inverse=True)
    sums, cases = np.bincount(index, weights=value).astype(np.float64), np.bincount(index)
    mean, users = float(value.mean()), len(sums)
    if users == 1:
        return Interval(mean, least, most)
    reach = student((1 + confidence) / 2, users - 1) * math.sqrt(users / (users - 1))
    residuals = sums - sums.sum() / cases.sum() * cases
    error = math.sqrt(float((residuals**2).sum())) / float(cases.sum())  # of a ratio of sums
    low, high = _bca(_resampled(sums, cases, resamples, seed), sums, cases, reach)
    one_more = 0.0 if difference else 1 / len(value)
    low = min(low, mean - reach * math.hypot(error, one_more * (mean - least)))
    high = max(high, mean + reach * math.hypot(error, one_more * (most - mean)))
    return Interval(mean, max(low, least), min(high, most))


def pigeonhole_bootstrap(difference: FloatArray, user: NDArray[np.integer], *, seed: int) -> Interval:
    """Return the mean of `difference` (seeds, cases) with an interval for other users and other seeds.

    Users and seeds are both drawn with replacement (Owen 2007, The pigeonhole bootstrap). The wider end of this
    interval and of that of `bootstrap`, which draws users alone, is returned.
    """
    alone = bootstrap(difference.mean(0), user, resamples=RESAMPLES, seed=seed, difference=True)
    _, index = np.unique(user, return_inverse=True)
    sums_SU = np.stack([np.bincount(index, weights=values) for values in difference])
    cases_U = np.bincount(index)
    generator = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for draw in range(RESAMPLES):
        users = generator.integers(0, len(cases_U), len(cases_U))
        seeds = generator.integers(0, len(sums_SU), len(sums_SU))
        means[draw] = sums_SU[np.ix_(seeds, users)].sum() / cases_U[users].sum() / len(seeds)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(alone.mean, min(alone.low, float(low)), max(alone.high, float(high)))


def _resampled(sums: FloatArray, cases: NDArray[np.integer], resamples: int, seed: int) -> FloatArray:
    """Return the means of random draws of as many users, given each user's sum of values and number of cases."""
    users = len(sums)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, 4_000_000 // users)  # bounds the memory of one draw
    for start in range(0, resamples, step):
        drawn = generator.integers(0, users, size=(min(step, resamples - start), users))
        means[start : start + step] = sums[drawn].sum(1) / cases[drawn].sum(1)
    return means


def _bca(means: FloatArray, sums: FloatArray, cases: NDArray[np.integer], reach: float) -> tuple[float, float]:
    """Return the ends of the BCa interval, `reach` standard deviations to each side on the normal scale."""
    normal = NormalDist()
    mean = sums.sum() / cases.sum()
    apart = np.where(np.abs(means - mean) < 1e-12, 0.0, means - mean)  # rounding must not decide
    below = float((1 - np.sign(apart)).sum()) / 2
    bias = normal.inv_cdf((below + 0.5) / (len(means) + 1))
    without = (sums.sum() - sums) / (cases.sum() - cases)  # the jackknife: each user left out once
    influence = without.mean() - without
    spread = float((influence**2).sum()) ** 1.5
    acceleration = float((influence**3).sum()) / (6 * spread) if spread else 0.0
    levels = []
    for end in (bias - reach, bias + reach):
        scale = 1 - acceleration * end
        levels.append(normal.cdf(bias + end / scale) if scale > 0 else float(end > 0))
    low, high = np.quantile(means, levels)
    return float(low), float(high)


@lru_cache
def student(level: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution, integrated over the angle whose tangent is t / sqrt(freedom).

    >>> round(student(0.975, 1), 2), round(student(0.975, 29), 3), round(student(0.975, 10**9), 3)
    (12.71, 2.045, 1.96)
    """
    freedom = min(freedom, 10_000.0)  # more are as good as normal
    angle = math.pi * ((np.arange(20_000) + 0.5) / 20_000 - 0.5)
    density = np.cos(angle) ** (freedom - 1)
    below = (density.cumsum() - density / 2) / density.sum()
    return math.sqrt(freedom) * math.tan(float(np.interp(level, below, angle)))


def paired_gain(
    cases: pa.Table, other: pa.Table, *, split: str = "valid", confidence: float = 0.95, seed: int
) -> Interval:
    """Return the mean NDCG@10 of `cases` minus that of `other` on the same targets, with a paired interval.

    Raises:
        ValueError: the two tables (artifacts.CASES_SCHEMA) do not hold the same cases.
    """
    ours, theirs = aligned(cases, other, split)
    difference = ndcg(ours["rank"], 10) - ndcg(theirs["rank"], 10)
    return bootstrap(difference, ours["user"], confidence=confidence, resamples=RESAMPLES, seed=seed, difference=True)


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
