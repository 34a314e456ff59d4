"""Metrics against arithmetic done by hand."""

from math import log2

import numpy as np
import pyarrow as pa
import pytest
import torch

from seqrec.artifacts import CASES_SCHEMA
from seqrec.evaluation import metrics


def test_one_case_of_each_kind():
    """Ranks 1, 3 and 12 in a catalogue of 20."""
    values = metrics.from_histogram(metrics.histogram(torch.tensor([1.0, 3.0, 12.0]), 20))

    assert values["ndcg@10"] == pytest.approx((1 + 1 / log2(4) + 0) / 3)
    assert values["recall@10"] == pytest.approx(2 / 3)
    assert values["recall@1"] == pytest.approx(1 / 3)
    assert values["mrr"] == pytest.approx((1 + 1 / 3 + 1 / 12) / 3)
    assert values["mrr@10"] == pytest.approx((1 + 1 / 3) / 3)
    assert values["recall@20"] == pytest.approx(1.0)


def test_a_rank_between_two_places():
    """Rank 2.5 is two items tied for places 2 and 3."""
    values = metrics.from_histogram(metrics.histogram(torch.tensor([2.5]), 20))

    assert values["ndcg@10"] == pytest.approx(1 / log2(3.5))
    assert values["mrr"] == pytest.approx(1 / 2.5)


def test_no_case_is_zero():
    assert set(metrics.from_histogram(metrics.histogram(torch.empty(0), 20)).values()) == {0.0}


def test_histograms_of_blocks_add_up():
    rank = torch.randint(2, 40, (100,)) / 2

    whole = metrics.histogram(rank, 20)
    parts = metrics.histogram(rank[:33], 20) + metrics.histogram(rank[33:], 20)

    assert torch.equal(whole, parts)


def test_bootstrap_interval_covers_as_often_as_it_says():
    """Of 200 samples from a known distribution, the 90 % intervals contain its mean about 180 times."""
    generator, hits = np.random.default_rng(0), 0
    for seed in range(200):
        value = generator.exponential(size=60)
        interval = metrics.bootstrap(value, np.arange(60), confidence=0.9, resamples=400, seed=seed)
        hits += interval.low <= 1.0 <= interval.high

    assert 165 <= hits <= 195


def test_bootstrap_draws_users_not_cases():
    """Copying each user's case a hundred times must not narrow the interval."""
    value, user = np.random.default_rng(1).normal(size=30), np.arange(30)

    once = metrics.bootstrap(value, user, resamples=500, seed=3)
    often = metrics.bootstrap(np.repeat(value, 100), np.repeat(user, 100), resamples=500, seed=3)

    assert often == pytest.approx(once)


def case_table(ranks):
    users = list(range(1, len(ranks) + 1))
    rows = {"split": ["valid"] * len(ranks), "user": users, "position": users, "target": users}
    return pa.table(rows | {"rank": ranks, "ties": [0] * len(ranks)}, schema=CASES_SCHEMA)


def test_paired_gain_by_hand():
    ours, theirs = case_table([1.0, 3.0, 11.0]), case_table([3.0, 3.0, 1.0])

    gain = metrics.paired_gain(ours, theirs, seed=0)

    assert gain.mean == pytest.approx(((1 - 0.5) + 0 + (0 - 1)) / 3)
    assert gain.low <= gain.mean <= gain.high


def test_paired_gain_is_blind_to_row_order_and_sees_a_constant_difference():
    ranks = list(np.random.default_rng(2).integers(2, 9, 50).astype(float))
    ours, theirs = case_table([1.0] * 50), case_table(ranks)
    shuffled = theirs.take(np.random.default_rng(3).permutation(50))

    assert metrics.paired_gain(ours, shuffled, seed=0) == metrics.paired_gain(ours, theirs, seed=0)
    assert metrics.paired_gain(ours, theirs, seed=0).low > 0


def test_runs_on_different_cases_are_not_compared():
    with pytest.raises(ValueError, match="different cases"):
        metrics.paired_gain(case_table([1.0, 2.0]), case_table([1.0]), seed=0)


def test_list_metrics_by_hand():
    """Five items with train counts 5, 3, 1, 1, 0; two lists of two."""
    lists, count = torch.tensor([[1, 2], [1, 5]]), torch.tensor([0, 5, 3, 1, 1, 0])

    values = metrics.list_metrics(lists, count)

    assert values["coverage"] == pytest.approx(3 / 5)
    assert values["mean_popularity"] == pytest.approx((5 + 3 + 5 + 0) / 4)
    assert values["tail_share"] == pytest.approx(2 / 4)  # the head is a fifth of five items: item 1
    assert values["novelty"] == pytest.approx(-(2 * log2(6 / 15) + log2(4 / 15) + log2(1 / 15)) / 4)
    # exposure 0 0 1 1 2: sum over (2 i - n - 1) x_i / (n sum x) = (0 * 1 + 2 * 1 + 4 * 2) / (5 * 4)
    assert values["gini"] == pytest.approx(10 / 20)


def test_equal_exposure_has_gini_zero_and_short_lists_do_not_count():
    count = torch.tensor([0, 1, 1])

    assert metrics.list_metrics(torch.tensor([[1, 2]]), count)["gini"] == pytest.approx(0.0)
    assert metrics.list_metrics(torch.tensor([[1, 0]]), count)["mean_popularity"] == pytest.approx(1.0)
