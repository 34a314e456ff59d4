"""Metrics against arithmetic done by hand."""

from math import log2

import numpy as np
import pytest
import torch
from sklearn.metrics import label_ranking_average_precision_score, ndcg_score, top_k_accuracy_score

from seqrec.evaluation import metrics


def test_a_rank_between_two_places():
    """Rank 2.5 is two items tied for places 2 and 3."""
    values = metrics.from_histogram(metrics.histogram(torch.tensor([2.5]), 20))

    assert values["ndcg@10"] == pytest.approx(1 / log2(3.5))
    assert values["mrr"] == pytest.approx(1 / 2.5)


def test_metrics_are_those_of_scikit_learn():
    """Of scores without ties; with one relevant item recall is the top-k accuracy, and MRR the average precision."""
    generator = np.random.default_rng(0)
    scores = generator.random((200, 30))
    target = generator.integers(0, 30, size=200)
    goal = scores[np.arange(200), target][:, None]
    rank = torch.from_numpy(1.0 + (scores > goal).sum(1))
    relevant = np.eye(30)[target]

    values = metrics.from_histogram(metrics.histogram(rank, 30))

    for k in metrics.CUTOFFS:
        assert values[f"ndcg@{k}"] == pytest.approx(ndcg_score(relevant, scores, k=k, ignore_ties=True))
        assert values[f"recall@{k}"] == pytest.approx(top_k_accuracy_score(target, scores, k=k, labels=np.arange(30)))
        cut = np.where(rank[:, None] <= k, relevant, 0)
        within = label_ranking_average_precision_score(relevant, scores, sample_weight=cut.sum(1))
        assert values[f"mrr@{k}"] == pytest.approx(within * (rank <= k).double().mean().item())
    assert values["mrr"] == pytest.approx(label_ranking_average_precision_score(relevant, scores))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("test/ndcg@10", 1.71),
        ("test/ndcg@10/low", -0.1),
        ("test/101/recall@10", 1.01),
        ("valid/accuracy", 7.0),
        ("test/novelty@10", float("nan")),
        ("train_seconds", float("inf")),
    ],
)
def test_an_impossible_metric_is_refused(name, value):
    with pytest.raises(ValueError, match=f"sasrec has impossible metrics, .*: {name} "):
        metrics.require_possible({"test/mrr": 0.5, name: value}, "sasrec")


def test_counts_and_rounding_are_no_impossible_metrics():
    fine = {"test/cases/popularity=head": 12, "test/ndcg@10": 1 + 1e-15, "parameters": 1e9, "test/novelty@10": 9.0}

    metrics.require_possible(fine, "sasrec")
    with pytest.raises(ValueError, match=r"test/ndcg@10 1\.00001$"):  # more than rounding
        metrics.require_possible(fine | {"test/ndcg@10": 1.00001}, "sasrec")


def test_no_case_is_zero():
    assert set(metrics.from_histogram(metrics.histogram(torch.empty(0), 20)).values()) == {0.0}


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
