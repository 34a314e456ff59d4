"""Metrics against arithmetic done by hand."""

from math import log2

import pytest
import torch

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
