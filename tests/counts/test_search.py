"""The choice of values on validation, and that a half of the users never chooses for itself."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support import nothing, prepare_rows

from seqrec.config import CountsConfig
from seqrec.counts import case_ranks, search, term
from seqrec.counts.case_ranks import CaseRanks
from seqrec.counts.search import Tables
from seqrec.counts.term import with_counts
from seqrec.data import sequences, ties
from seqrec.evaluation import ranking


@dataclass(frozen=True)
class Level:
    """What users of even and of odd index gain."""

    even: float = 0.0
    odd: float = 0.0
    both: float = 0.0


USER = torch.arange(20)
OFF = CountsConfig(alpha=0.0)


def leveled(values):
    """Return ranks: even users gain from `even` and lose from `odd`, odd ones the reverse; all gain from `both`."""
    own = np.where(USER.numpy() % 2 == 0, values.even - values.odd, values.odd - values.even)
    return np.exp(-own - values.both)


def test_each_half_is_scored_with_what_the_other_half_chose():
    choice = search.search(leveled, USER, [Level(both=0.1)] * 3, [[{"even": 1.0}], [{"odd": 1.0}]])

    assert (choice.folds[0].odd, choice.folds[0].even) == (1.0, 0.0)  # for even users, chosen by odd ones
    assert (choice.folds[1].odd, choice.folds[1].even) == (0.0, 1.0)
    assert choice.cross_fitted < choice.in_sample


def test_the_search_takes_the_best_and_stays_where_nothing_is_better():
    axes = [[{"both": level} for level in (0.5, 2.0, 1.9)]]

    assert search.search(leveled, USER, [Level()] * 3, axes).values.both == 2.0
    assert search.search(leveled, USER, [Level(both=3.0)] * 3, axes).values.both == 3.0
    axes = [[{"both": 2.0}], lambda found: [{"both": found.both + 1}]]  # an alternative of what was found
    assert search.search(leveled, USER, [Level()] * 3, axes).values.both == 4.0  # twice from the one to the other


@pytest.mark.parametrize(("peak", "both"), [(1.0, 5.0), (0.01, 0.0)])
def test_a_search_that_stays_at_its_start_is_repeated_from_another(peak, both):
    """Only together, `both` and `odd` may be better than the start."""

    def valley(values):
        return np.exp(np.full(20, -0.1 if values == Level() else 0.5 - peak * values.both * values.odd))

    axes = [[{"odd": 1.0}], [{"both": 5.0}]]

    assert search.search(valley, USER, [Level()] * 3, axes).values == Level()
    choice = search.search(valley, USER, [Level()] * 3, axes, again=Level(both=2.0))
    assert [found.both for found in (choice.values, *choice.folds)] == [both] * 3


def test_all_users_get_settings_that_a_half_found_if_they_are_better():
    """Alone, `odd` helps odd users less than it costs the others; with `both` it helps everybody."""

    def together(values):
        own = np.where(USER.numpy() % 2 == 0, -2 * values.odd, values.odd)
        return np.exp(-own - values.odd * values.both)

    choice = search.search(together, USER, [Level()] * 3, [[{"odd": 1.0}], [{"both": 5.0}]])

    assert choice.values == choice.folds[0] == Level(odd=1.0, both=5.0)
    assert choice.folds[1] == Level()


@pytest.mark.parametrize(("spread", "both"), [(0.01, 1.0), (1.0, 0.0)])
def test_what_must_be_better_with_certainty_is_not_taken_for_a_gain_of_a_few_users(spread, both):
    def scattered(values):
        return np.exp(-values.both * (0.1 + spread * np.resize([1.0, 1.0, -1.0, -1.0], 20)))

    axes = [[{"both": 1.0}]]
    rules = {"value": search.by_rank, "errors": 2.0}
    assert search.search(scattered, USER, [Level()] * 3, axes, value=search.by_rank).values.both == 1.0
    choice = search.search(scattered, USER, [Level()] * 3, axes, **rules)
    assert [found.both for found in (choice.values, *choice.folds)] == [both] * 3


def test_pairs_across_times_count_less_only_in_visits_of_one_order_beside_a_model(data, monkeypatch):
    """Every case gains from `across`, but by its name alone: no table of counts is computed."""

    class Ranks:
        def __init__(self, base, data, cases, *, filter_seen):
            self.number = len(cases)

        def __call__(self, counts, alpha, popularity):
            return np.full(self.number, 2.0 + getattr(counts, "across", 1.0))

    monkeypatch.setattr(search, "CaseRanks", Ranks)
    monkeypatch.setattr(
        Tables, "built", lambda tables, config: config if config.across < 1 else term.build(data, config)
    )
    tied = {"counts": {"events": 100, "tied_events": 50}}
    visits = replace(data, times=data.times // 4_000, card=data.card | tied)
    shuffled = ties.shuffled(visits, *ties.groups(visits), torch.Generator().manual_seed(0))

    def chosen(data, **given):
        start = CountsConfig()
        return search.choose(nothing, Tables(data), data, filter_seen=True, start=start, axes=(), **given).values.across

    assert chosen(visits) == 0.1
    assert chosen(visits, alone=True) == chosen(shuffled) == 1.0
    tied["counts"]["tied_events"] = 5
    assert chosen(visits) == 1.0


def test_beside_a_model_and_with_few_cases_popularity_alone_is_chosen_by_ndcg(data, monkeypatch):
    """A weight of popularity, or alpha 2, moves every second target to the top, and the others far down.

    Alpha 3 moves them less: this is better by the logarithm, but worse by NDCG@10 and by the mean rank.
    """

    class Ranks:
        def __init__(self, base, data, cases, *, filter_seen):
            self.number = len(cases)
            numbers.append(self.number)

        def __call__(self, counts, alpha, popularity):
            moved = popularity < 0 or alpha == 2.0
            rank = [1.0, 39.0] if moved else [2.0, 11.0] if alpha == 3.0 else [5.0, 5.0]
            return np.resize(rank, self.number)

    numbers = []
    monkeypatch.setattr(search, "SCORES", 0)
    monkeypatch.setattr(search, "LEAST", 20)
    monkeypatch.setattr(search, "LEAST_ALONE", 30)
    monkeypatch.setattr(search, "CaseRanks", Ranks)
    start, axes = CountsConfig(alpha=1.0), [[{"alpha": 2.0}, {"alpha": 3.0}]]

    def chosen(**given):
        found = search.choose(nothing, Tables(data), data, filter_seen=True, start=start, axes=axes, **given).values
        return found.alpha, found.popularity < 0

    assert (chosen(), chosen(alone=True), numbers) == ((3.0, True), (2.0, False), [20, 30])
    monkeypatch.setattr(search, "FEW", 10)
    assert chosen() == (2.0, False)


def test_a_search_by_ranks_keeps_the_halves_apart(data, monkeypatch):
    """Alpha 2 helps users of even index alone, so users of odd index alone may get it."""

    class Ranks:
        def __init__(self, base, data, cases, *, filter_seen):
            self.even = cases.user.numpy() % 2 == 0

        def __call__(self, counts, alpha, popularity):
            return np.where(self.even == (alpha == 2.0), 20.0, 30.0)

    monkeypatch.setattr(search, "CaseRanks", Ranks)
    start, axes = CountsConfig(alpha=1.0), [[{"alpha": 2.0}]]

    folds = search.choose(nothing, Tables(data), data, filter_seen=True, start=start, axes=axes).folds

    assert [fold.alpha for fold in folds] == [1.0, 2.0]


WAYS = [(True, True), (False, True), (False, False)]  # a dense matrix or pairs, and whether seen items are left out
TERMS = [
    {},
    {"alpha": 0.0},
    {"popularity": -0.3, "rho": 0.5},
    {"alpha": 0.5, "popularity": 0.2, "kernel": "root", "window": 3},
    {"targets": 2},
    {"values": "sum", "alpha": 0.5, "popularity": 0.2, "rho": 1.0, "window": 1},  # equal votes
    {"values": "repeats", "decay": "root", "events": 20},
]


@pytest.mark.parametrize(("square", "filter_seen"), WAYS)
@pytest.mark.parametrize("values", TERMS, ids=str)
def test_the_ranks_of_a_search_are_those_of_a_ranking(data, values, filter_seen, square, monkeypatch):
    monkeypatch.setattr(term, "DENSE", 1 << 24 if square else 0)
    monkeypatch.setattr(case_ranks, "SCORES", 0 if filter_seen else 1 << 20)  # kept or not
    monkeypatch.setattr(case_ranks, "CELLS_AT_ONCE", 7 * data.num_items)
    settings = CountsConfig(**values)
    alone = replace(settings, alpha=1.0, popularity=0.0)
    cases, (counts, part) = search.drawn_cases(data, Tables(data)), map(Tables(data).built, (settings, alone))
    base_VD = torch.randn(len(data.count), 4, generator=torch.Generator().manual_seed(0)).round()  # ties

    def base(_, user, stop):
        score = base_VD[data.items[stop - 1].long()] @ base_VD[1:].T
        return lambda: iter([(1, score[:, :15].clone()), (16, score[:, 15:].clone())])

    ranks = CaseRanks(base, data, cases, filter_seen=filter_seen)

    expected = ranking.rank(with_counts(base, counts), data, cases, filter_seen=filter_seen, both=False).rank.tolist()
    assert len(set(expected)) > 2
    weights = settings.alpha, settings.popularity if settings.alpha else 0.0
    found = ranks(part, *weights)
    np.testing.assert_allclose(found, expected, atol=1)  # rounding may part what is tied
    assert (found == expected).mean() > 0.9
    ranks(part, 7.0)
    assert ranks(part, *weights).tolist() == found.tolist()  # what is kept stays as it is


def test_tables_that_are_counted_ahead_are_those_of_their_settings(data, monkeypatch):
    ahead, alone = Tables(data), Tables(data)
    ahead.count_ahead(OFF, search.ADDED)
    settings = [replace(OFF, **change) for change in search.KERNELS]
    found = [alone.table(config) for config in settings]

    monkeypatch.setattr(search, "counted", None)  # nothing is left to count
    for config, of_config in zip(settings, found, strict=True):
        assert all(map(torch.equal, vars(ahead.table(config)).values(), vars(of_config).values()))


def test_without_cases_there_are_no_ranks(data):
    cases = sequences.Cases(user=torch.empty(0, dtype=torch.long), position=torch.empty(0, dtype=torch.long))
    ranks, counts = CaseRanks(nothing, data, cases, filter_seen=True), Tables(data).built(CountsConfig())

    assert (ranks(counts).shape, ranks.weighted(counts, (1.0, 2.0)).shape) == ((0,), (2, 0))


@pytest.mark.parametrize(("name", "decay"), [("ease", {"rho": 0.9}), ("repeats", {"decay": "root"})])
@pytest.mark.parametrize(("square", "filter_seen"), WAYS)
def test_a_further_term_is_weighed_as_it_is_ranked(data, filter_seen, square, monkeypatch, name, decay):
    monkeypatch.setattr(term, "DENSE", 1 << 24 if square else 0)
    tables, cases = Tables(data), sequences.cases(data, "valid")
    base = tables.scorer(nothing, CountsConfig(popularity=-0.2), data.device)
    votes, (how,) = tables.built(CountsConfig(values=name, events=20, **decay)), decay.values()

    found = CaseRanks(base, data, cases, filter_seen=filter_seen).weighted(votes, (30.0, 0.0))

    for weight, ours in zip((30.0, 0.0), found, strict=True):
        settings = {name: weight, f"{name}_decay": how, "ease_events": 20}
        both = tables.built(CountsConfig(popularity=-0.2, **settings))
        ranked = ranking.rank(with_counts(nothing, both), data, cases, filter_seen=filter_seen, both=False)
        assert ours == pytest.approx(ranked.rank.numpy())
    assert found[0].mean() != found[1].mean() or (name == "repeats" and filter_seen)


@pytest.mark.parametrize(("square", "helps"), [(True, True), (False, True), (True, False)])
def test_repeats_are_added_where_users_return_to_items_of_their_own(tmp_path, square, helps, monkeypatch):
    """Each user has 6 of 60 items, of which any may follow any, or returns to none."""
    monkeypatch.setattr(term, "DENSE", 1 << 24 if square else 0)
    draw, rows = np.random.default_rng(0), []
    for user in range(150):
        items = draw.permutation(60)[: 6 if helps else 14]
        order = draw.choice(items, 14) if helps else items
        rows += [(f"u{user}", f"i{item}", time) for time, item in enumerate(order)]
    data = sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1))

    choice = search.choose(nothing, Tables(data), data, filter_seen=False, start=OFF, further=["repeats"])

    assert search.has_repeats(data) is helps
    assert (choice.values.repeats > 0, choice.values.repeats_decay != "inverse") == (helps, helps)  # all ages alike
    without = search.choose(nothing, Tables(data), data, filter_seen=False, start=OFF)
    assert (choice.in_sample > without.in_sample + 0.05) is helps


@pytest.mark.parametrize("helps", [True, False])
def test_ease_is_added_where_whole_histories_say_more_than_the_last_events(tmp_path, helps):
    """Each user has one of three tastes; with `helps`, ten events in a row hide it from the counts."""
    draw = np.random.default_rng(0)
    rows = []
    for user in range(120):
        taste, noise = draw.permutation(10)[:8] + 10 * (user % 3), 30 + draw.permutation(20)[:11]
        *past, valid, test = taste if helps else noise
        order = [*past, *(noise if helps else taste)[:11], valid, test]
        rows += [(f"u{user}", f"i{item}", time) for time, item in enumerate(order)]
    data = sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1))

    choice = search.choose(nothing, Tables(data), data, filter_seen=True, start=OFF, further=["ease"])

    assert choice.values.ease > 0 or not helps
    without = search.choose(nothing, Tables(data), data, filter_seen=True, start=OFF)
    assert (choice.in_sample > without.in_sample + 0.05) is helps


@pytest.mark.parametrize(("scores", "number"), [(10**9, 50), (40 * 33, 33), (0, 20)])
def test_the_cases_of_a_large_catalogue_are_fewer(data, monkeypatch, scores, number):
    assert data.num_items == 40
    monkeypatch.setattr(search, "CASES", 50)
    monkeypatch.setattr(search, "SCORES", scores)

    assert len(search.drawn_cases(data, Tables(data), 20)) == number


def test_cases_whose_items_have_many_followers_are_fewer(data, monkeypatch):
    tables, most = Tables(data), 800
    monkeypatch.setattr(search, "PAIRS", most)
    all_of_a_matrix = search.drawn_cases(data, tables)
    monkeypatch.setattr(term, "DENSE", 0)
    few = search.drawn_cases(data, tables)
    monkeypatch.setattr(search, "PAIRS", 1 << 24)
    every = search.drawn_cases(data, tables)

    followers = tables.table(CountsConfig()).offsets.diff()
    assert 0 < len(few) < len(every) == len(all_of_a_matrix)
    assert followers[sequences.window(data, few.user, few.position, 10).items].sum() <= most
    assert set(few.position.tolist()) < set(every.position.tolist())


def told(data, user, stop):
    """A scorer that knows the targets."""

    def blocks():
        score = torch.arange(data.num_items).float().repeat(len(user), 1) / data.num_items
        score[torch.arange(len(user)), data.items[stop].long() - 1] += 5
        yield 1, score

    return blocks


@pytest.mark.parametrize(("base", "helps"), [(told, False), (nothing, True)])
def test_alpha_is_zero_for_a_model_that_counts_cannot_help(data, base, helps):
    choice = search.choose(base, Tables(data), data, filter_seen=True, start=OFF)

    assert (choice.values.alpha > 0) is helps
    assert Tables(data).scorer(base, CountsConfig(alpha=0.0), data.device) is base


def test_beside_scores_that_say_nothing_the_counts_decide(data):
    """The sum with loud noise finds what counts alone find, weight of popularity included."""

    def noise(data, user, stop):
        score = 4 * torch.randn(len(user), data.num_items, generator=torch.Generator().manual_seed(int(stop.sum())))
        return lambda: iter([(1, score.clone())])

    alone = search.choose(nothing, Tables(data), data, filter_seen=True, start=OFF)
    choice = search.choose(noise, Tables(data), data, filter_seen=True, start=OFF)

    assert choice.values.alpha > 8
    assert choice.in_sample > 0.95 * alone.in_sample


def test_where_the_last_event_decides_older_ones_hardly_vote(tmp_path):
    follower, draw, rows = np.random.default_rng(1).permutation(30), np.random.default_rng(2), []
    for user in range(150):
        item = 0
        for time in range(15):
            item = follower[item] if draw.random() < 0.5 else draw.integers(30)
            rows.append((f"u{user}", f"i{item}", time))
    data = sequences.load(prepare_rows(tmp_path, rows))

    assert search.choose(nothing, Tables(data), data, filter_seen=False, start=OFF).values.rho < 0.5
