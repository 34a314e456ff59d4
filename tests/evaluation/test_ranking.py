import pytest
import torch
from support import make_model, prepare_rows, synthetic_rows

from seqrec.data import sequences
from seqrec.evaluation import metrics, ranking


def fixed_scorer(score_V):
    """Everybody gets the same scores; item blocks as small as the module's constant says."""

    def scorer(data, user, stop):
        def blocks():
            for first in range(1, len(score_V), ranking.ITEMS_PER_BLOCK):
                yield first, score_V[first : first + ranking.ITEMS_PER_BLOCK].repeat(len(user), 1)

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


def test_item_numbers_of_the_example(three):
    assert three.items.tolist() == [1, 2, 3, 2, 1, 4, 1, 5, 1, 5]  # in order of first appearance: a b c e d


@pytest.mark.parametrize(
    ("scores", "filtered", "unfiltered"),
    [
        # targets c=3, e=4, d=5; histories {1,2}, {2,1}, {1,5}
        ([9, 5, 4, 3, 2, 1], [1, 2, 4], [3, 4, 5]),
        ([9, 1, 2, 3, 4, 5], [3, 2, 1], [3, 2, 1]),
        ([9, 7, 7, 7, 7, 7], [2, 2, 2.5], [3, 3, 3]),  # a constant scorer is in the middle, never on top
    ],
)
def test_ranks_by_hand(three, scores, filtered, unfiltered):
    ranked = ranking.rank(
        fixed_scorer(torch.tensor(scores).float()), three, sequences.cases(three, "test"), filter_seen=True
    )

    assert ranked.rank.tolist() == filtered
    assert ranked.rank_unfiltered.tolist() == unfiltered


def test_ties_count_the_other_candidates(three):
    cases = sequences.cases(three, "test")
    constant = fixed_scorer(torch.zeros(6))

    assert ranking.rank(constant, three, cases, filter_seen=True).ties.tolist() == [2, 2, 3]
    assert ranking.rank(constant, three, cases, filter_seen=False).ties.tolist() == [4, 4, 4]


def test_lists_leave_out_seen_items_but_never_the_target(three):
    ranked = ranking.rank(
        fixed_scorer(torch.tensor([9.0, 5, 4, 3, 2, 1])),
        three,
        sequences.cases(three, "test"),
        filter_seen=True,
        top_k=5,
    )

    assert ranked.top.tolist() == [[3, 4, 5, 0, 0], [3, 4, 5, 0, 0], [2, 3, 4, 5, 0]]


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("items", [3, 11, 65_536])
def test_blocks_change_nothing(prepared, monkeypatch, rows, items):
    data = sequences.load(prepared)
    cases = sequences.cases(data, "test")
    score = torch.randn(data.num_items + 1).round(decimals=1)  # with ties

    whole = ranking.rank(fixed_scorer(score), data, cases, filter_seen=True, top_k=4)
    monkeypatch.setattr(ranking, "ITEMS_PER_BLOCK", items)
    parts = ranking.rank(fixed_scorer(score), data, cases, filter_seen=True, top_k=4, rows=rows)

    assert torch.equal(whole.rank, parts.rank)
    assert torch.equal(whole.rank_unfiltered, parts.rank_unfiltered)
    assert torch.equal(whole.score, parts.score)


def test_ranks_equal_a_full_sort(prepared):
    """Against sorting all scores of the model, seen items removed, one case at a time."""
    data = sequences.load(prepared)
    model = make_model("sasrec", num_items=data.num_items).eval()
    cases = sequences.cases(data, "test")

    ranked = ranking.rank(ranking.model_scorer(model), data, cases, filter_seen=True, top_k=10)

    for case, (user, stop) in enumerate(zip(cases.user.tolist(), cases.position.tolist(), strict=True)):
        history, target = data.items[data.start[user] : stop].tolist(), int(data.items[stop])
        query = model(
            sequences.window(data, cases.user[case : case + 1], cases.position[case : case + 1], 12), last=True
        )
        scores = (model.item_vectors() @ query[0, 0]).tolist()
        allowed = [item for item in range(1, data.num_items + 1) if item == target or item not in history]
        ordered = sorted(allowed, key=lambda item: -scores[item])
        assert ranked.rank[case] == 1 + ordered.index(target)
        assert ranked.top[case].tolist() == ordered[:10]


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


def test_renumbered_items_have_the_same_metrics(tmp_path):
    """Item ids carry no information: reversing them reverses the numbers, and changes no metric."""
    rows = synthetic_rows(users=30)
    popularity = []
    for name, rename in (("as is", lambda i: i), ("renamed", lambda i: f"x{997 - int(i[1:])}")):
        folder = prepare_rows(tmp_path / name, [(u, rename(i), t) for u, i, t in rows])
        data = sequences.load(folder)
        ranked = ranking.rank(fixed_scorer(data.count.float()), data, sequences.cases(data, "test"), filter_seen=True)
        popularity.append(metrics.from_histogram(metrics.histogram(ranked.rank, data.num_items)))

    assert popularity[0] == popularity[1]
