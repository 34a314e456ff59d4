import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import make_model, prepare_rows, trained

from seqrec.data import sequences
from seqrec.evaluation import ranking, results
from seqrec.serving.recommender import best_of


def fixed_scorer(score):
    """Everybody gets their row of scores, or all the same ones; item blocks as small as the module's constant says."""

    def scorer(data, user, stop):
        score_BV = score[user] if score.ndim == 2 else score.repeat(len(user), 1)

        def blocks():
            for first in range(1, data.num_items + 1, ranking.ITEMS_PER_BLOCK):
                yield first, score_BV[:, first : first + ranking.ITEMS_PER_BLOCK].clone()

        return blocks

    return scorer


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Items a to e = 1 to 5; every user's last event is test. u: a b c, v: b a e, w: a d a d."""
    rows = [
        (user, item, time)
        for user, row in {"u": "abc", "v": "bae", "w": "adad"}.items()
        for time, item in enumerate(row)
    ]
    folder = tmp_path_factory.mktemp("three")
    return sequences.load(prepare_rows(folder, rows, min_user_events=1, min_item_events=1))


@pytest.mark.parametrize("rows", [1, 2, 10])
def test_targets_in_the_history_are_a_slice(three, monkeypatch, rows):
    monkeypatch.setattr(ranking, "_rows", lambda data: rows)
    cases = sequences.cases(three, "test")

    assert ranking.repeats(three, cases).tolist() == [False, False, True]  # w has had d before
    assert results.target_slices(three, cases)["repeat=no"].tolist() == [True, True, False]
    assert "repeat=no" not in results.target_slices(three, sequences.Cases(cases.user[:2], cases.position[:2]))


def test_no_history_is_read_if_seen_items_stay_candidates(three, monkeypatch):
    cases, scorer = sequences.cases(three, "test"), fixed_scorer(torch.tensor([9.0, 5, 4, 3, 2, 1]))
    monkeypatch.delattr(ranking.SeenItems, "before")

    ranked = ranking.rank(scorer, three, cases, filter_seen=False, both=False)
    item, _ = ranking.best(scorer, three, cases.user, cases.position, filter_seen=False, top_k=2)

    assert ranked.rank.tolist() == ranked.rank_unfiltered.tolist() == [3, 4, 5]
    assert item.tolist() == [[1, 2]] * 3


def test_the_history_of_a_user_with_many_cases_is_read_once(three, monkeypatch):
    read, ranges = [], sequences.ranges
    monkeypatch.setattr(
        sequences, "ranges", lambda first, number: read.append(int(number.sum())) or ranges(first, number)
    )

    ranking.SeenItems.before(three, torch.zeros(100, dtype=torch.long), three.stop[:1].expand(100))

    assert read[0] == three.stop[0] - three.start[0]


def test_scores_do_not_hold_the_graph_of_the_forward_pass(three):
    """The search for counts keeps the queries of thousands of cases."""
    cases = sequences.cases(three, "valid")
    scorer = ranking.model_scorer(make_model("sasrec", num_items=three.num_items).eval())

    assert torch.is_grad_enabled()
    assert not any(score.requires_grad for _, score in scorer(three, cases.user, cases.position)())


@pytest.mark.parametrize("k", [1, 5, 30])
def test_of_equal_scores_the_lower_item_comes_first_in_tables_and_in_the_service(data, monkeypatch, k):
    monkeypatch.setattr(ranking, "ITEMS_PER_BLOCK", 7)
    cases, generator = sequences.cases(data, "test"), torch.Generator().manual_seed(0)
    score_V = torch.randint(3, (data.num_items + 1,), generator=generator).float()
    order_V = np.lexsort((np.arange(data.num_items), -score_V[1:].numpy())) + 1

    items, _ = ranking.best(fixed_scorer(score_V), data, cases.user, cases.position, filter_seen=False, top_k=k)

    assert items.tolist() == [order_V[:k].tolist()] * len(cases)
    assert best_of(score_V.numpy().copy(), [], k)[1] == order_V[:k].tolist()


def test_blocks_are_small_where_histories_are_long(data, monkeypatch):
    cases, scorer = sequences.cases(data, "test"), fixed_scorer(torch.randn(data.num_items + 1))
    whole = ranking.rank(scorer, data, cases, filter_seen=True, top_k=4)
    read, before = [], ranking.SeenItems.before

    def counted(data, user, stop):
        read.append(int((stop - data.start[user]).sum()))
        return before(data, user, stop)

    monkeypatch.setattr(ranking, "EVENTS_IN_MEMORY", 50)
    monkeypatch.setattr(ranking.SeenItems, "before", counted)
    parts = ranking.rank(scorer, data, cases, filter_seen=True, top_k=4)
    ranking.best(scorer, data, cases.user, cases.position, filter_seen=True, top_k=4)

    assert torch.equal(whole.rank, parts.rank)
    assert torch.equal(whole.top, parts.top)
    assert len(read) > 20
    assert max(read) <= 50
    assert ranking.case_blocks(torch.tensor([60, 10, 40, 1]), 2) == [slice(0, 1), slice(1, 3), slice(3, 4)]


@pytest.mark.parametrize("cases", [[(0, 0), (1, 3), (2, 1)], [(2, 4), (0, 2), (2, 0), (2, 3), (0, 1)]])
def test_seen_items_of_a_user_with_one_case_or_several(three, cases):
    user = torch.tensor([user for user, _ in cases])
    stop = three.start[user] + torch.tensor([length for _, length in cases])

    seen = ranking.SeenItems.before(three, user, stop)

    for row, (first, last) in enumerate(zip(three.start[user].tolist(), stop.tolist(), strict=True)):
        assert seen.item[seen.row == row].tolist() == sorted(set(three.items[first:last].tolist()))


def test_ranks_among_the_stored_negatives(tmp_path, monkeypatch):
    """Equal to counting by hand, whatever the item blocks; the full ranks are there besides."""
    rows = [(f"u{u}", f"i{(7 * u + 3 * e) % 150}", e) for u in range(30) for e in range(6)]
    data = sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1, protocol="LOO-101"))
    cases = sequences.cases(data, "test")
    score = torch.randint(0, 20, (data.num_items + 1,)).float()
    monkeypatch.setattr(ranking, "ITEMS_PER_BLOCK", 11)

    ranked = ranking.rank(fixed_scorer(score), data, cases, filter_seen=True)

    for rank, user, position in zip(ranked.rank_sampled.tolist(), cases.user, cases.position, strict=True):
        target, rivals = score[data.items[position]], score[data.negatives[user].long()]
        assert rank == 1 + int((rivals > target).sum()) + int((rivals == target).sum()) / 2
    assert (ranked.rank_sampled < ranked.rank).any()


def mid_rank_by_hand(scores, target, others):
    """1 + the candidates above the target + half of those level with it."""
    return 1 + sum((scores[i] > scores[target]) + (scores[i] == scores[target]) / 2 for i in others if i != target)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from([1, 3, 7, 65_536]), st.integers(1, 6), st.booleans()
)
def test_ranks_equal_a_brute_force_ranker(three, monkeypatch, seed, rows, items, levels, filter_seen):
    """Scores of `levels` values, so that ties are frequent; another row of scores for every case."""
    cases = sequences.cases(three, "test")
    table = np.random.default_rng(seed).integers(0, levels, size=(three.num_users, three.num_items + 1))

    monkeypatch.setattr(ranking, "ITEMS_PER_BLOCK", items)
    scorer = fixed_scorer(torch.from_numpy(table).float())
    ranked = ranking.rank(scorer, three, cases, filter_seen=filter_seen, top_k=5, rows=rows)

    for case, (user, stop) in enumerate(zip(cases.user.tolist(), cases.position.tolist(), strict=True)):
        scores, target = table[user].tolist(), int(three.items[stop])
        everything = set(range(1, three.num_items + 1))
        past = set(three.items[three.start[user] : stop].tolist())
        unseen = everything - past | {target}
        shown = unseen if filter_seen else everything
        assert ranked.rank[case] == mid_rank_by_hand(scores, target, unseen)
        assert ranked.rank_unfiltered[case] == mid_rank_by_hand(scores, target, everything)
        assert ranked.ties[case] == sum(scores[i] == scores[target] for i in shown) - 1
        shown = shown - past if filter_seen else shown  # as in serving, where no target is known
        best = sorted((scores[item] for item in shown), reverse=True)[:5]
        listed, rest = ranked.top[case].tolist()[: len(best)], ranked.top[case].tolist()[len(best) :]
        assert [scores[item] for item in listed] == best
        assert set(listed) <= shown
        assert not any(rest)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("items", [2, 65_536])
def test_scores_that_are_not_finite_are_refused(three, monkeypatch, bad, items):
    monkeypatch.setattr(ranking, "ITEMS_PER_BLOCK", items)
    cases = sequences.cases(three, "test")
    scorer = fixed_scorer(torch.tensor([9, 5, 4, 3, bad, 1]))

    with pytest.raises(ValueError, match=r"scores of sasrec are not finite .* for items .* and user"):
        ranking.rank(scorer, three, cases, filter_seen=True, name="sasrec")
    with pytest.raises(ValueError, match="scores of the model are not finite"):
        ranking.best(scorer, three, cases.user, cases.position, filter_seen=True, top_k=3)


@pytest.fixture(scope="module")
def newcomers(tmp_path_factory):
    """A temporal split: six users train, the cases after the cuts are the first events of four others, and theirs."""
    rows = [(f"old{n % 6}", f"i{n % 7}", n) for n in range(70)]
    rows += [(f"new{n % 4}" if n % 3 else f"old{n % 6}", f"i{n % 5}", n) for n in range(70, 100)]
    settings = {"min_user_events": 2, "min_item_events": 2, "valid_share": 0.15, "test_share": 0.15, "cases": "first"}
    return sequences.load(prepare_rows(tmp_path_factory.mktemp("new"), rows, protocol="temporal", **settings))


@pytest.mark.parametrize(("architecture", "objective"), trained("causal", "last", "cloze"))
def test_a_case_without_history_is_answered_by_popularity(newcomers, architecture, objective):
    """Ranked alone, and listed among others; for every model."""
    data = newcomers
    model = make_model(
        architecture, num_items=data.num_items, num_users=data.num_users, length=20, objective=objective
    ).eval()
    cases = sequences.cases(data, "valid")
    empty = cases.position == data.start[cases.user]
    assert 2 < int(empty.sum()) < len(cases)

    own, popularity = ranking.model_scorer(model), fixed_scorer(data.count.float())
    ranked = ranking.rank(own, data, cases, filter_seen=True, top_k=5, rows=1)
    popular = ranking.rank(popularity, data, cases, filter_seen=True, top_k=5)

    for values, expected in zip(vars(ranked).values(), vars(popular).values(), strict=True):
        assert torch.equal(values[empty], expected[empty]) or bool(values.isnan().all())
    listed = [ranking.rank(one, data, cases, filter_seen=False, top_k=5).score[~empty] for one in (own, popularity)]
    assert not torch.equal(*listed)
    assert bool(ranked.rank.isfinite().all())
    item, score = ranking.best(ranking.model_scorer(model), data, cases.user, cases.position, filter_seen=True, top_k=5)
    assert item[empty].tolist() == popular.top[empty].tolist()
    assert not bool(score.isnan().any())
