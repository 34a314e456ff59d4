"""The count term: its arithmetic, and that dense, sparse, single and exported forms of it agree."""

from dataclasses import replace
from itertools import pairwise
from math import log

import pytest
import torch
from support import nothing, prepare_rows

from seqrec.config import CountsConfig
from seqrec.counts import term
from seqrec.data import sequences
from seqrec.evaluation import ranking

CONFIG = CountsConfig(alpha=0.7, window=3, smoothing=0.5, rho=0.5, events=4, popularity=0.3)


@pytest.fixture
def found(data):
    return term.build(data, CONFIG)


@pytest.fixture
def histories(data):
    """Those of nine users, of which each ends one event earlier."""
    users = torch.arange(9)
    return sequences.window(data, users, data.stop[users] - users, 7).items


def test_pctm_by_hand(tmp_path):
    """C_ab = 1, C_ac = 1/2, C_bc = 1, C_ba = 1, C_bd = 1/2, C_ad = 1; training has a twice, b twice, c, d once.

    Items a b c d = 1 2 3 4; known of training: {a b c}, {b a d}; then an event each split.
    """
    rows = [(f"u{n}", item, time) for n, items in enumerate(["abcda", "badcb"]) for time, item in enumerate(items)]
    four = sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1))
    config = CountsConfig(smoothing=0.25, rho=0.5, popularity=-0.1)
    scores = term.build(four, config).adder(torch.tensor([[0, 1, 2]]))(torch.zeros(1, 5), 0)[0]  # after a, then b

    newest, before = 1 / 1.5, 0.5 / 1.5
    assert four.count.tolist() == [0, 2, 2, 1, 1]
    expected = [
        newest * log(1 + 1 / 0.25) - 0.1 * log(3 / 10),  # a: after b
        before * log(1 + 1 / 0.25) - 0.1 * log(3 / 10),  # b: after a
        newest * log(1 + 1 / 0.25) + before * log(1 + 0.5 / 0.25) - 0.1 * log(2 / 10),  # c: after both
        newest * log(1 + 0.5 / 0.25) + before * log(1 + 1 / 0.25) - 0.1 * log(2 / 10),  # d
    ]
    assert scores[1:].tolist() == pytest.approx(expected)


def test_dense_and_sparse_tables_add_the_same(data, found, histories, monkeypatch):
    base = torch.randn(len(histories), len(data.count))

    dense = found.adder(histories)(base.clone(), 0)
    monkeypatch.setattr(term, "DENSE", 0)
    sparse = found.adder(histories)(base.clone(), 0)

    torch.testing.assert_close(dense, sparse)
    size = len(data.count)
    for cuts in ((0, 13, 14, size), (0, 1, size), (0, size - 1, size)):
        blocks = [found.adder(histories)(base[:, a:b].clone(), a) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(blocks, 1), sparse)


def test_shares_of_events_and_scores_of_candidates_are_those_of_the_whole(data, found, histories):
    score_BV = found.adder(histories)(torch.zeros(len(histories), len(data.count)), 0)
    item_BC = torch.randint(1, len(data.count), (len(histories), 6))

    torch.testing.assert_close(found.of(histories, item_BC), score_BV.gather(1, item_BC))
    share_BCL = found.shares(histories, item_BC)
    popular_BC = CONFIG.popularity * found.log_popularity[item_BC]
    torch.testing.assert_close(share_BCL.sum(2) + popular_BC, score_BV.gather(1, item_BC))
    assert not share_BCL[:, :, : -CONFIG.events].any()


def test_more_items_change_nothing_for_the_others(data, histories):
    size, found = len(data.count), term.build(data, replace(CONFIG, repeats=0.5))
    grown = found.grown(size + 3).to(torch.device("cpu"))

    before = found.adder(histories)(torch.zeros(len(histories), size), 0)
    after = grown.adder(histories)(torch.zeros(len(histories), size + 3), 0)

    assert torch.equal(after[:, :size], before)
    assert (after[:, size:] == CONFIG.popularity * found.log_popularity[1:].min()).all()
    again = torch.tensor([[size, size + 2]])  # new items that the user had before
    votes = grown.further["repeats"].adder(again)(torch.zeros(1, size + 3), 0)
    votes = grown.further["repeats"].to(torch.device("cpu")).adder(again)(votes, 0)
    assert votes.nonzero()[:, 1].tolist() == [size, size + 2]
    torch.testing.assert_close(votes[0, size + 2], 2 * 0.5 * grown.further["repeats"].weights[0])


def test_halves_of_the_users_get_their_own_scorer(data):
    parts = [term.with_counts(nothing, term.build(data, CountsConfig(rho=rho))) for rho in (0.3, 0.9)]
    cases = sequences.cases(data, "valid")
    even, odd = (ranking.rank(part, data, cases, filter_seen=True).rank for part in parts)

    ranked = ranking.rank(term.by_halves(*parts), data, cases, filter_seen=True).rank

    assert not torch.equal(even, odd)
    assert torch.equal(ranked, torch.where(cases.user % 2 == 0, even, odd))
