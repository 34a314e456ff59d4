"""Intervals against arithmetic done by hand, and against what their confidence promises."""

import numpy as np
import pyarrow as pa
import pytest

from seqrec.artifacts import CASES_SCHEMA
from seqrec.evaluation import intervals


def test_bootstrap_interval_covers_as_often_as_it_says():
    """Of 200 samples from a known distribution, the 90 % intervals contain its mean about 180 times."""
    generator, hits = np.random.default_rng(0), 0
    for seed in range(200):
        value = generator.exponential(size=60)
        interval = intervals.bootstrap(value, np.arange(60), confidence=0.9, resamples=400, seed=seed)
        hits += interval.low <= 1.0 <= interval.high

    assert 165 <= hits <= 195


def test_bootstrap_draws_users_not_cases():
    """Copying each user's case a hundred times must not narrow the interval."""
    value, user = np.random.default_rng(1).normal(size=30), np.arange(30)

    once = intervals.bootstrap(value, user, resamples=500, seed=3)
    often = intervals.bootstrap(np.repeat(value, 100), np.repeat(user, 100), resamples=500, seed=3)

    assert often == pytest.approx(once)


def case_table(ranks):
    users = list(range(1, len(ranks) + 1))
    rows = {"split": ["valid"] * len(ranks), "user": users, "position": users, "target": users}
    return pa.table(rows | {"rank": ranks, "ties": [0] * len(ranks)}, schema=CASES_SCHEMA)


def test_paired_gain_by_hand():
    ours, theirs = case_table([1.0, 3.0, 11.0]), case_table([3.0, 3.0, 1.0])

    gain = intervals.paired_gain(ours, theirs, seed=0)

    assert gain.mean == pytest.approx(((1 - 0.5) + 0 + (0 - 1)) / 3)
    assert gain.low <= gain.mean <= gain.high


def test_paired_gain_is_blind_to_row_order_and_sees_a_constant_difference():
    ranks = list(np.random.default_rng(2).integers(2, 9, 50).astype(float))
    ours, theirs = case_table([1.0] * 50), case_table(ranks)
    shuffled = theirs.take(np.random.default_rng(3).permutation(50))

    assert intervals.paired_gain(ours, shuffled, seed=0) == intervals.paired_gain(ours, theirs, seed=0)
    assert intervals.paired_gain(ours, theirs, seed=0).low > 0


def test_runs_on_different_cases_are_not_compared():
    with pytest.raises(ValueError, match="different cases"):
        intervals.paired_gain(case_table([1.0, 2.0]), case_table([1.0]), seed=0)
