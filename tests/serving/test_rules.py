"""What may be shown: filters and lists hold inside the top k, diversity is maximal marginal relevance."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import requests
import torch
from support import make_model, service

from seqrec.artifacts import write_table
from seqrec.serving import rules
from seqrec.serving.approximate_search import ApproximateEngine
from seqrec.serving.recommender import Recommender, Request
from seqrec.serving.rules import Attribute, Attributes, NumberRange

GENRES = ("Comedy", "Drama, Comedy", "Horror|Sci-Fi", None)
HISTORIES = [["i1", "i2"], ["i9"], ["unheard of"]]


def attributes(item_ids):
    years = ["" if number % 7 == 0 else str(1980 + number % 40) for number in range(len(item_ids))]
    return Attributes({"genres": Attribute([GENRES[n % 4] for n in range(len(item_ids))]), "year": Attribute(years)})


def has(recommender, item_id, genre):
    """Whether a genre, or all that `attributes` writes into one text, is the item's."""
    text = (recommender.attributes["genres"].values[recommender.items[item_id] - 1] or "").lower()
    return genre.lower() in [text, *text.replace("|", ", ").split(", ")]


@pytest.fixture(scope="module")
def exact(recommender):
    found = copy.copy(recommender)
    found.counts = found.counts + np.arange(41, dtype=np.float32) / 100  # no ties
    found.attributes = attributes(found.item_ids)
    found.titles = {item_id: f"Title of {item_id}" for item_id in found.item_ids}
    return found


@pytest.fixture(scope="module")
def approximate():
    """A search over 600 items."""
    torch.manual_seed(0)
    ids, counts = [f"i{number}" for number in range(1, 601)], np.arange(601)
    engine = ApproximateEngine(make_model("sasrec", num_items=600), None, 500)
    found = Recommender(engine, ids, counts, [], filter_seen=True)
    found.attributes = attributes(ids)
    return found


RULES = [
    {"filter": {"genres": ["comedy"]}},
    {"filter": {"genres": ["Sci-Fi", "drama, comedy"], "year": NumberRange(min=1985, max=2015)}},
    {"filter": {"year": NumberRange(max=2017)}, "exclude": ["i3", "i4"]},
    {"allow": ["i3", "i5", "i7", "i1", "unheard of"]},
    {"allow": []},
]


@pytest.mark.parametrize("engine", ["exact", "approximate"])  # the graph: test_onnx_graph.py
@pytest.mark.parametrize("wanted", RULES)
def test_rules_hold_inside_the_top_k(request, engine, wanted):
    """The best k of those that may be shown, as many as there are, whoever else is in the batch."""
    recommender = request.getfixturevalue(engine)
    total = len(recommender.item_ids)
    everything = recommender.answer([Request(history=history, k=total) for history in HISTORIES])
    conditions = wanted.get("filter", {})

    def shown(item_id):
        year = float(recommender.attributes["year"].values[recommender.items[item_id] - 1] or "nan")
        span = conditions.get("year", NumberRange())
        return (
            item_id in wanted.get("allow", [item_id])
            and item_id not in wanted.get("exclude", ())
            and ("genres" not in conditions or any(has(recommender, item_id, one) for one in conditions["genres"]))
            and ("year" not in conditions or (span.min or 0) <= year <= (span.max or 9999))
        )

    asked = [Request(history=history, k=5, **wanted) for history in HISTORIES]
    answers = recommender.answer([*asked, Request(history=["i2"], k=9)])

    for answer, ranked in zip(answers, everything, strict=False):
        right = [item_id for item_id in ranked.items if shown(item_id)][:5]
        assert answer.items == right
        assert len(right) == 5 or "allow" in wanted
    assert answers[-1].items == recommender.recommend(["i2"], 9).items


def test_the_commonest_values_come_first_each_item_counted_once():
    found = Attribute(["Drama|Comedy", "comedy, Comedy", "War", None, " ,", "Drama"]).by_frequency[:3]

    assert found == ["Comedy", "Drama", "War"]  # with as many items: by name


def test_attributes_come_from_the_items_table(tmp_path):
    columns = {"item_id": ["b", "a"], "title": ["B", "A"], "genres": ["x, Y", None], "year": ["1999", "unknown"]}
    write_table(tmp_path / "items.parquet", pa.table(columns))

    found = Attributes.read(str(tmp_path / "items.parquet"), ["a", "b", "not in the table"])

    assert set(found) == {"genres", "year"}
    assert found["genres"].meets(["y "]).tolist() == [False, False, True, False]
    assert found["genres"].meets([""]).sum() == 0
    assert found["year"].meets(NumberRange(max=2000)).tolist() == [False, False, True, False]
    assert found["year"].meets(NumberRange()).tolist() == [False, False, True, False]
    grown = found.grown([{"genres": "y, z"}, {"title": "c"}])  # by the items of a request
    assert grown["genres"].meets(["y"]).tolist() == [False, False, True, False, True, False]
    with pytest.raises(ValueError, match="quota: attribute 'colour' is unknown; known: genres, year"):
        found.check("quota", ["colour"])
    with pytest.raises(ValueError, match="none: set serve --items"):
        Attributes().check("filter", ["year"])


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"id": ["a"]}, "item_id is missing"),
        ({"item_id": [5]}, "item_id is int64"),
        ({"item_id": ["a"], "year": [1999], "genres": [["x"]]}, "year is int64, genres is list<.*>"),
    ],
)
def test_a_table_of_items_that_rules_cannot_read_is_refused(tmp_path, columns, reason):
    write_table(tmp_path / "items.parquet", pa.table(columns))

    with pytest.raises(ValueError, match=f"items.parquet is not a table that `ingest` wrote.*: {reason}$"):
        Attributes.read(tmp_path / "items.parquet", ["a"])
    (tmp_path / "items.csv").write_text("item_id,year\na,1999\n")
    with pytest.raises(ValueError, match=r"items.csv is not a Parquet file: name one .* such as data/items.parquet"):
        Attributes.read(tmp_path / "items.csv", ["a"])


@pytest.mark.parametrize("diversity", [0.0, 0.3, 0.7, 1.0])
def test_a_diverse_list_is_that_of_brute_force(diversity):
    score, vector = torch.randn(15), torch.randn(15, 4)
    scaled = ((score - score.min()) / (score.max() - score.min())).tolist()
    cosine = torch.nn.functional.cosine_similarity(vector[:, None], vector[None], dim=2).tolist()
    expected = [scaled.index(max(scaled))]
    while len(expected) < 6:
        rest = [n for n in range(15) if n not in expected]
        gains = [(1 - diversity) * scaled[n] - diversity * max(cosine[n][c] for c in expected) for n in rest]
        expected.append(rest[gains.index(max(gains))])

    assert rules.most_relevant_and_diverse(score.numpy(), vector.numpy(), 6, diversity) == expected
    assert sorted(rules.most_relevant_and_diverse(score.numpy(), vector.numpy(), 99, diversity)) == list(range(15))


@pytest.mark.parametrize("engine", ["exact", "approximate"])
@pytest.mark.parametrize(
    "quota", [{"Comedy": 2}, {"Comedy": 3, "Drama": 1}, {"Comedy": 0, "Horror": 0}, {"Comedy": 10**30, "Western": 0}]
)
def test_a_quota_is_the_best_list_that_keeps_it(request, engine, quota):
    """As a walk down the whole ranking would have it: k items, though all of the best hundred may be over."""
    recommender = request.getfixturevalue(engine)
    k, total = 8, len(recommender.item_ids)
    for history in HISTORIES:
        ranked = recommender.recommend(history, total, boost={"genres": {"Comedy": 1e6}})
        expected, left = [], dict(quota)
        for item_id in ranked.items:
            own = [value for value in quota if has(recommender, item_id, value)]
            if len(expected) < k and all(left[value] > 0 for value in own):
                expected.append(item_id)
                left |= {value: left[value] - 1 for value in own}
        answer = recommender.recommend(history, k, boost={"genres": {"Comedy": 1e6}}, quota={"genres": quota})
        assert answer.items == expected
        assert len(expected) == k


@pytest.mark.parametrize("history", HISTORIES)
def test_a_boost_is_a_factor_of_the_probability(exact, history):
    boost = {"genres": {"Comedy": 2.5, "Drama": 0.5}}
    plain, boosted = (exact.recommend(history, 40, boost=wanted, exclude=["i3"]) for wanted in ({}, boost))
    factor = {i: 2.5 ** has(exact, i, "Comedy") * 0.5 ** has(exact, i, "Drama") for i in plain.items}
    popular = plain.source == "popularity"  # whose scores are numbers of events
    weight = {i: s if popular else math.exp(s) for i, s in zip(plain.items, plain.scores, strict=True)}

    expected = {item_id: weight[item_id] * factor[item_id] for item_id in plain.items}
    assert boosted.items == sorted(expected, key=expected.__getitem__, reverse=True)
    got = [s if popular else math.exp(s) for s in boosted.scores]
    assert got == pytest.approx(sorted(expected.values(), reverse=True), rel=1e-4)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("factor", [1e300, 1e-300])
def test_a_boost_of_any_size_leaves_every_item_a_finite_score(exact, history, factor):
    plain = exact.recommend(history, 40)
    boosted = exact.recommend(history, 40, boost={"genres": {"Comedy": factor, "comedy": factor}})

    assert sorted(boosted.items) == sorted(plain.items)
    assert all(map(math.isfinite, boosted.scores))


def test_a_quota_holds_in_a_diverse_list_and_among_others(exact):
    quota = {"genres": {"Comedy": 2}}
    asked = [Request(history=["i1"], k=6, quota=quota, diversity=0.5), Request(history=["i2"], k=40)]

    first, second = exact.answer(asked)

    assert len(first.items) == 6
    assert sum(has(exact, item_id, "Comedy") for item_id in first.items) == 2
    assert second.items == exact.recommend(["i2"], 40).items
    assert exact.recommend(["i1"], 6, quota=quota, allow=["i3"]).items == ["i3"]
    assert exact.recommend(["i1"], 6, quota=quota, allow=[]).items == []


@pytest.mark.parametrize("history", HISTORIES)
def test_a_diverse_list_is_chosen_among_the_best_that_may_be_shown(exact, history):
    best = exact.recommend(history, 40, exclude=["i3"])
    vector_ND = exact.engine.item_vectors[[exact.items[item] for item in best.items]].numpy()
    places = rules.most_relevant_and_diverse(np.array(best.scores, np.float32), vector_ND, 6, 0.9)

    found = exact.recommend(history, 6, diversity=0.9, exclude=["i3"])

    assert found.items == [best.items[place] for place in places]
    assert found.items != best.items[:6]
    assert found.scores == pytest.approx([best.scores[place] for place in places])
    assert exact.recommend(history, 6, diversity=0.5, allow=[]).items == []


def test_each_position_is_explored_with_its_probability():
    draw = random.Random(1)
    lists = [rules.explored(range(10), 100, 0.3, draw) for _ in range(2_000)]

    given_away = [sum(found[n] != n for found in lists) / len(lists) for n in range(10)]
    assert given_away == pytest.approx([0.3] * 10, abs=0.05)  # five standard errors
    assert all(len(set(found)) == 10 for found in lists)
    drawn = Counter(item for found in lists for item in found if item >= 10)
    assert set(drawn) == set(range(10, 100))
    assert max(drawn.values()) < 2 * min(drawn.values())
    assert rules.explored(range(3), 4, 1.0, draw).count(3) == 1  # no more than there are others


@pytest.mark.parametrize("history", HISTORIES)
def test_exploration_keeps_the_rules_and_the_scores(exact, history):
    wanted = {"exclude": ["i3"], "filter": {"genres": ["comedy"]}}
    everything = exact.recommend(history, 40, **wanted)
    score = dict(zip(everything.items, everything.scores, strict=True))

    explored = exact.recommend(history, 5, explore=1.0, **wanted)

    assert len(explored.items) == 5
    assert explored.scores == pytest.approx([score[item] for item in explored.items])
    assert not set(explored.items) & set(everything.items[:5])
    assert exact.recommend(history, 5, explore=0.0, **wanted).items == everything.items[:5]


def test_rules_over_http(exact):
    popular = copy.copy(exact)
    popular.counts = np.arange(41.0)
    with service(popular) as address:

        def post(**body):
            return requests.post(f"{address}/recommend", json={"history": ["i1"], **body}, timeout=10)

        def get(path):
            return requests.get(f"{address}{path}", timeout=10)

        available = popular.item_ids[30:32]
        filtered = post(filter={"year": {"min": 1990}}, allow=available, diversity=0.5).json()["items"]
        assert sorted(filtered) == sorted(available)
        assert "known: genres, year" in post(filter={"colour": ["red"]}).json()["detail"][0]["msg"]
        ruled = post(boost={"genres": {"Drama": 1e6}}, quota={"genres": {"Drama": 2}}, k=5).json()["items"]
        assert [has(popular, item_id, "Drama") for item_id in ruled] == [True, True, False, False, False]
        for wrong in (
            {"filter": {"year": {"least": 1}}},
            {"diversity": 1.5},
            {"diversity": 0.5, "k": 1_001},
            {"explore": -0.1},
            {"explore": 0.1, "quota": {"genres": {"Drama": 2}}},
            {"boost": {"genres": {"Drama": 0}}},
            {"quota": {"genres": {"Drama": -1}}},
            {"quota": {"no": {}}},
        ):
            assert post(**wrong).status_code == 422
        best = get("/popular?k=3").json()
        assert best["scores"] == [40, 39, 38]
        assert best["items"] == [exact.item_ids[n] for n in (39, 38, 37)]
        assert best["titles"][0] == f"Title of {exact.item_ids[39]}"
        assert get("/similar/i5").json()["items"] == popular.similar("i5").items
        assert len(get("/similar/i5?k=1000").json()["items"]) == 39
        assert get("/similar/un/heard").status_code == 404
