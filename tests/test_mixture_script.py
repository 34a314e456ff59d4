"""scripts/mixture.py: the memory holds every training target once, and its nearest positions vote."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import make_model
from torch.nn import functional as F

from scripts import mixture
from seqrec.data import sequences
from seqrec.evaluation import ranking


@pytest.fixture
def data(prepared):
    return sequences.load(prepared)


@pytest.fixture
def model(data):
    torch.manual_seed(0)
    return make_model("flash4rec", num_items=data.num_items, num_users=data.num_users, length=64).eval()


@torch.no_grad()
def test_the_memory_has_the_query_before_each_training_target(data, model, monkeypatch):
    monkeypatch.setattr(mixture, "ROWS", 7)
    expected = {}
    for user in range(data.num_users):
        for stop in range(int(data.start[user]) + 1, int(data.train_stop[user])):
            batch = sequences.window(data, torch.tensor([user]), torch.tensor([stop]), 64)
            expected[stop] = (int(data.items[stop]), F.normalize(model(batch, last=True)[0, 0], dim=0))

    keys, items = mixture.memory(model, data)

    assert sorted(items.tolist()) == sorted(item for item, _ in expected.values())
    for item, query in expected.values():
        assert ((keys[items == item] - query).abs().amax(1) < 1e-5).any()


def test_the_nearest_positions_vote(monkeypatch):
    monkeypatch.setattr(mixture, "KEYS", 3)
    monkeypatch.setattr(mixture, "ROWS", 2)
    generator = torch.Generator().manual_seed(0)
    query, key = (F.normalize(torch.randn(n, 4, generator=generator), dim=1) for n in (5, 8))
    item = torch.tensor([3, 1, 3, 2, 1, 1, 4, 2])

    found = mixture.votes(query, key, item, 5, nearest=4, temperature=0.5)

    expected = np.zeros((5, 6))
    for row, cosine in enumerate((query @ key.T).numpy()):
        best = np.argsort(-cosine)[:4]
        for place in best:
            expected[row, item[place]] += np.exp(cosine[place] / 0.5) / np.exp(cosine[best] / 0.5).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_mixture_of_one_network_with_itself_ranks_as_the_network_but_for_its_memory(data, model, share):
    cases = {split: sequences.cases(data, split) for split in mixture.SPLITS}

    scores = mixture.mixed([model, model], data, cases, share=share, nearest=50, temperature=0.1)

    mixed, alone = mixture.scorer_of(scores, cases), ranking.model_scorer(model)
    for split in mixture.SPLITS:
        torch.testing.assert_close(scores[split].exp().sum(1), torch.ones(len(cases[split])))
        ranks = [ranking.rank(s, data, cases[split], filter_seen=True, both=False).rank for s in (mixed, alone)]
        assert bool((ranks[0] == ranks[1]).all()) == (share == 0)


def test_networks_share_probabilities_and_votes(data, model):
    other = make_model("flash4rec", num_items=data.num_items, num_users=data.num_users, length=64).eval()
    cases = {"test": sequences.cases(data, "test")}

    def probability(*models, share):
        return mixture.mixed(models, data, cases, share=share, nearest=50, temperature=0.1)["test"].exp()

    own = [probability(one, share=0.0) for one in (model, other)]
    votes = [probability(one, share=1.0) for one in (model, other)]
    geometric = (own[0] * own[1]).sqrt()
    expected = 0.7 * geometric / geometric.sum(1, keepdim=True) + 0.3 * (votes[0] + votes[1]) / 2
    torch.testing.assert_close(probability(model, other, share=0.3), expected)
