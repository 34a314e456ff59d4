"""The count term: its arithmetic, and that dense, sparse, single and exported forms of it agree."""

from math import log

import pytest
import torch
from support import prepare_rows

from seqrec.config import CountsConfig
from seqrec.counts import term
from seqrec.data import sequences
from seqrec.evaluation import ranking

CONFIG = CountsConfig(alpha=0.7, window=3, smoothing=0.5, rho=0.5, events=4, popularity=0.3)


@pytest.fixture
def four(tmp_path):
    """Items a b c d = 1 2 3 4; known of training: {a b c}, {b a d}; then an event each split."""
    rows = [(f"u{n}", item, time) for n, items in enumerate(["abcda", "badcb"]) for time, item in enumerate(items)]
    return sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1))


def histories(data, rows=9):
    users = torch.arange(rows)
    return sequences.window(data, users, data.stop[users] - users, 7).items


def test_pctm_by_hand(four):
    """C_ab = 1, C_ac = 1/2, C_bc = 1, C_ba = 1, C_bd = 1/2, C_ad = 1; training has a twice, b twice, c, d once."""
    config = CountsConfig(smoothing=0.25, rho=0.5, popularity=-0.1)
    found = term.build(four, config).adder(torch.tensor([[0, 1, 2]]))(torch.zeros(1, 5), 0)[0]  # after a, then b

    newest, before = 1 / 1.5, 0.5 / 1.5
    assert four.count.tolist() == [0, 2, 2, 1, 1]
    expected = [
        newest * log(1 + 1 / 0.25) - 0.1 * log(3 / 10),  # a: after b
        before * log(1 + 1 / 0.25) - 0.1 * log(3 / 10),  # b: after a
        newest * log(1 + 1 / 0.25) + before * log(1 + 0.5 / 0.25) - 0.1 * log(2 / 10),  # c: after both
        newest * log(1 + 0.5 / 0.25) + before * log(1 + 1 / 0.25) - 0.1 * log(2 / 10),  # d
    ]
    assert found[1:].tolist() == pytest.approx(expected)


def test_dense_and_sparse_tables_add_the_same(prepared, monkeypatch):
    data = sequences.load(prepared)
    found, items_BL = term.build(data, CONFIG), histories(data)
    base = torch.randn(len(items_BL), len(data.count))

    dense = found.adder(items_BL)(base.clone(), 0)
    monkeypatch.setattr(term, "DENSE", 0)
    sparse = found.adder(items_BL)(base.clone(), 0)
    blocks = [found.adder(items_BL)(base[:, a:b].clone(), a) for a, b in ((0, 13), (13, 14), (14, len(data.count)))]

    torch.testing.assert_close(dense, sparse)
    assert torch.equal(torch.cat(blocks, 1), sparse)


def test_shares_of_events_and_scores_of_candidates_are_those_of_the_whole(prepared):
    data = sequences.load(prepared)
    found, items_BL = term.build(data, CONFIG), histories(data)
    score_BV = found.adder(items_BL)(torch.zeros(len(items_BL), len(data.count)), 0)
    item_BC = torch.randint(1, len(data.count), (len(items_BL), 6))

    torch.testing.assert_close(found.of(items_BL, item_BC), score_BV.gather(1, item_BC))
    share_BCL = found.shares(items_BL, item_BC)
    popular_BC = CONFIG.popularity * found.log_popularity[item_BC]
    torch.testing.assert_close(share_BCL.sum(2) + popular_BC, score_BV.gather(1, item_BC))
    assert not share_BCL[:, :, : -CONFIG.events].any()


def test_an_empty_history_gets_popularity_alone(prepared):
    data = sequences.load(prepared)
    found = term.build(data, CONFIG)

    score_BV = found.adder(torch.zeros(1, 5, dtype=torch.int64))(torch.zeros(1, len(data.count)), 0)

    torch.testing.assert_close(score_BV[0], CONFIG.popularity * found.log_popularity)


def test_more_items_change_nothing_for_the_others(prepared):
    data = sequences.load(prepared)
    found, items_BL, size = term.build(data, CONFIG), histories(data), len(data.count)
    grown = found.grown(size + 3)

    before = found.adder(items_BL)(torch.zeros(len(items_BL), size), 0)
    after = grown.adder(items_BL)(torch.zeros(len(items_BL), size + 3), 0)

    assert torch.equal(after[:, :size], before)
    assert (after[:, size:] == CONFIG.popularity * found.log_popularity[1:].min()).all()


def test_without_a_term_the_scorer_is_the_same():
    assert term.with_counts(term.nothing, None) is term.nothing


def test_halves_of_the_users_get_their_own_scorer(prepared):
    data = sequences.load(prepared)
    parts = [term.with_counts(term.nothing, term.build(data, CountsConfig(rho=rho))) for rho in (0.3, 0.9)]
    cases = sequences.cases(data, "valid")
    even, odd = (ranking.rank(part, data, cases, filter_seen=True).rank for part in parts)

    ranked = ranking.rank(term.by_halves(*parts), data, cases, filter_seen=True).rank

    assert not torch.equal(even, odd)
    assert torch.equal(ranked, torch.where(cases.user % 2 == 0, even, odd))
