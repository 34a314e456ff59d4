"""Approximate search: finds what exact search finds, scores it exactly, and says how much it misses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support import make_model

from seqrec.counts.term import CountTerm
from seqrec.serving.approximate_search import ApproximateEngine, recall
from seqrec.serving.recommender import Recommender, Request
from seqrec.serving.torch_engine import TorchEngine

ITEMS = 2_000
HISTORY = [f"i{number}" for number in range(3, 60, 7)]


@pytest.fixture(scope="module")
def pair():
    """The same model over 2,000 items of very different lengths: searched exactly, and approximately."""
    torch.manual_seed(0)
    model = make_model("sasrec", num_items=ITEMS, d_model=16)
    with torch.no_grad():
        model.items.weight.copy_(torch.randn(ITEMS + 1, 16) * torch.rand(ITEMS + 1, 1) * 3)
    ids, counts = [f"i{number}" for number in range(1, ITEMS + 1)], np.arange(ITEMS + 1)
    engines = TorchEngine(model), ApproximateEngine(model, None, 500)
    return [Recommender(engine, ids, counts, [], filter_seen=True) for engine in engines]


@pytest.mark.parametrize("filter_seen", [True, False])
def test_a_wide_search_answers_as_the_exact_one(pair, filter_seen):
    exact, approximate = pair
    best = exact.recommend(HISTORY, 3).items
    requests = [
        Request(history=HISTORY, k=10, exclude=best),
        Request(history=HISTORY[:1], k=1),
        Request(history=["unknown"], k=4),
        Request(history=[*HISTORY, *best], k=7),
    ]
    for one in pair:
        one.filter_seen = filter_seen
    expected, got = exact.answer(requests), approximate.answer(requests)
    alone = approximate.answer(requests[1:2])

    for right, found in zip([*expected, expected[1]], [*got, *alone], strict=True):
        assert found.items == right.items
        assert found.scores == pytest.approx(right.scores, rel=1e-5)
    assert not set(best) & set(got[0].items)
    assert 0.95 < recall(approximate) <= 1


def test_items_that_counts_raise_for_every_history_are_found(pair):
    """With a negative weight of popularity, these are the rare ones."""
    generator = torch.Generator().manual_seed(2)
    none = torch.zeros(0)
    term = CountTerm(
        offsets=torch.zeros(ITEMS + 2, dtype=torch.int64),
        targets=none.int(),
        values=none,
        weights=torch.ones(1),
        log_popularity=-8 * torch.rand(ITEMS + 1, generator=generator),
        popularity=-30.0,
    )
    engine = ApproximateEngine(pair[1].engine.model, term, 500)
    ids, counts = pair[1].item_ids, pair[1].counts
    approximate = Recommender(engine, ids, counts, [], filter_seen=True)
    exact = Recommender(TorchEngine(pair[1].engine.model, term), ids, counts, [], filter_seen=True)

    assert recall(approximate) > 0.95
    assert approximate.recommend(HISTORY, 5).items == exact.recommend(HISTORY, 5).items


def test_no_answer_depends_on_the_other_requests(pair):
    """A search that keeps more candidates finds more; only the request that needs them gets them."""
    approximate = copy.copy(pair[1])
    approximate.engine = ApproximateEngine(pair[1].engine.model, None, 16)
    generator = torch.Generator().manual_seed(1)
    histories = [[f"i{n}" for n in torch.randint(1, ITEMS, (5,), generator=generator).tolist()] for _ in range(100)]
    requests = [Request(history=history, k=10) for history in histories]
    beside = [Request(history=HISTORY, k=10, exclude=[f"i{n}" for n in range(1, 300)]), Request(history=HISTORY, k=90)]

    alone = [approximate.answer([request])[0].items for request in requests]

    assert [answer.items for answer in approximate.answer([*beside, *requests])[2:]] == alone
    assert alone != [answer.items for answer in pair[0].answer(requests)]  # the search is narrow enough to miss some


def test_more_than_half_of_the_catalogue_is_ranked_exactly(pair, monkeypatch):
    exact, approximate = pair
    monkeypatch.setattr(approximate.engine, "_search", None)

    assert approximate.recommend(HISTORY, ITEMS + 5) == exact.recommend(HISTORY, ITEMS + 5)


def test_recall_is_the_share_of_the_best_that_is_found(pair, monkeypatch):
    approximate = pair[1]
    searched = approximate.engine._search

    def half(query_D, number):
        item_C = searched(query_D, 3 * number)
        order_C = (approximate.engine.item_vectors[item_C] @ query_D).argsort(descending=True)
        return item_C[torch.cat([order_C[:5], order_C[15:20]])]  # five of the best, five that are not

    monkeypatch.setattr(approximate.engine, "_search", half)

    assert recall(approximate) == pytest.approx(0.5, abs=0.01)
