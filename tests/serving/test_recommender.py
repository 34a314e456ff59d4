"""Requests by external ids: what the evaluation ranks, and every odd request answered."""

import math
import time

import numpy as np
import pytest
from support import save

from seqrec.data import sequences
from seqrec.evaluation import ranking
from seqrec.serving.recommender import Recommender, Request

REQUEST_TIME = {"flash4rec": {"request_time": True}, "hstu": {"relative_time": True, "request_time": True}}


def test_recommendations_are_those_of_the_evaluation(prepared, tmp_path, architecture):
    """Of every architecture, for users with histories of different lengths answered together."""
    assert_recommendations_are_those_of_the_evaluation(prepared, save(architecture[0], prepared, tmp_path))


@pytest.mark.parametrize(("name", "options"), REQUEST_TIME.items())
def test_a_request_is_answered_for_its_time_as_in_the_evaluation(prepared, tmp_path, name, options):
    saved = save(name, prepared, tmp_path, options=options)
    assert_recommendations_are_those_of_the_evaluation(prepared, saved)

    recommender = Recommender.load(saved)
    ask = {"history": ["i1", "i2", "i3"], "k": 40, "times": [time.time() - 9000, 0, time.time() - 7000]}
    now, later = recommender.recommend(**ask), recommender.recommend(**ask, at=time.time() + 3e6)
    assert now.scores == pytest.approx(recommender.recommend(**ask, at=time.time()).scores, abs=1e-5)
    assert now.scores != pytest.approx(later.scores, abs=1e-5)
    # without times, the request follows the last event as events follow each other
    assumed, gap = recommender.recommend(["i1", "i2"], 40), recommender.gap
    given = recommender.recommend(["i1", "i2"], 40, times=[0, gap], at=2 * gap)
    assert assumed.scores == pytest.approx(given.scores, abs=1e-5)


def assert_recommendations_are_those_of_the_evaluation(prepared, saved):
    recommender = Recommender.load(saved)
    data = sequences.load(prepared)
    cases = sequences.cases(data, "test")
    ranked = ranking.rank(ranking.model_scorer(recommender.engine.model), data, cases, filter_seen=True, top_k=5)
    item_ids, user_ids = sequences.read_items(prepared), sequences.read_users(prepared)
    requests, expected = [], []
    for case in range(0, len(cases), 7):
        user, stop = int(cases.user[case]), int(cases.position[case])
        history = [item_ids[item - 1] for item in data.items[data.start[user] : stop].tolist()]
        times = data.times[data.start[user] : stop].tolist()
        # evaluation keeps the target as a candidate, serving cannot know it
        target = item_ids[int(data.items[stop]) - 1]
        best = [item_ids[item - 1] for item in ranked.top[case].tolist() if item]
        expected.append([item for item in best if item != target or target not in history])
        at = float(data.times[stop])
        requests.append(Request(history=history, k=5, user=user_ids[user], times=times, at=at))

    answers = recommender.answer(requests)

    assert [a.items[: len(e)] for a, e in zip(answers, expected, strict=True)] == expected


def test_unknown_items_are_skipped_and_counted_and_excluded_ones_not_shown(recommender):
    plain = recommender.recommend(["i1", "i2"], 5)

    odd = recommender.recommend(["i1", "nobody knows this", "i2"], 5)
    assert (odd.items, odd.scores, odd.unknown, odd.source) == (plain.items, plain.scores, 1, "sasrec")
    assert plain.unknown == 0
    without = recommender.recommend(["i1", "i2"], 5, exclude=[plain.items[0], "nor this"])
    assert without.items[:4] == plain.items[1:]


@pytest.mark.parametrize(("history", "why"), [([], "is empty"), (["nobody knows this"], "has no known item")])
def test_without_a_known_item_the_popular_ones_are_given_and_said_to_be(prepared, recommender, history, why):
    counts = sequences.load(prepared).count

    best = recommender.recommend(history, 3)

    assert best.scores == sorted(counts[1:].tolist(), reverse=True)[:3]
    assert best.source == "popularity"
    assert best.unknown == len(history)
    assert best.notes == [f"the history {why}: these are the most popular ones"]


def test_what_the_model_no_longer_sees_is_not_shown_again(recommender):
    seen = [f"i{n % 30}" for n in range(100)]

    shown = recommender.recommend(seen, 1_000).items

    assert set(shown) == set(recommender.item_ids) - set(seen)


def test_missing_times_are_the_median_gap_apart_and_the_answer_says_so(prepared, tmp_path):
    data = sequences.load(prepared)
    recommender = Recommender.load(save("tisasrec", prepared, tmp_path, median_gap=sequences.median_gap(data)))

    assumed = recommender.recommend(["i1", "i2", "i3"], 5)
    given = recommender.recommend(["i1", "i2", "i3"], 5, times=[0, 1000, 2000])

    assert sequences.median_gap(data) == 1000  # the events of the fixture are so far apart
    assert assumed.scores == pytest.approx(given.scores, abs=1e-6)
    assert "1000 s" in assumed.notes[0]
    assert "`at` is not read" in recommender.recommend(["i1", "i2", "i3"], 5, at=3000).notes[0]
    assert not given.notes
    other = recommender.recommend(["i1", "i2", "i3"], 5, times=[0, 10, 900_000_000])
    assert other.scores != pytest.approx(given.scores, abs=1e-6)


@pytest.mark.parametrize("name", ["tisasrec", "strec"])
def test_times_further_apart_than_numbers_reach_are_answered(prepared, tmp_path, name):
    recommender = Recommender.load(save(name, prepared, tmp_path))

    best = recommender.recommend(["i1", "i2", "i3", "i4"], 5, times=[-1e308, -1e308, 0, 1e308])

    assert len(best.items) == 5
    assert all(map(math.isfinite, best.scores))


def test_requests_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="k must be at least 1, not 0"):
        Request(history=["i1"], k=0)
    with pytest.raises(ValueError, match="times: 1 times for a history of 2 events"):
        Request(history=["i1", "i2"], times=[1])
    for given in ({"times": [math.nan]}, {"at": math.nan}):
        with pytest.raises(ValueError, match="NaN is no time"):
            Request(history=["i1"], **given)


@pytest.mark.parametrize("architecture", ["sasrec", "bert4rec", "caser", "mfbpr", "ssept"])
def test_similar_items_have_the_largest_cosine_whatever_their_bias(prepared, tmp_path, architecture):
    recommender = Recommender.load(save(architecture, prepared, tmp_path))
    vectors = recommender.engine.item_vectors.double().numpy()
    vectors = vectors if architecture == "sasrec" else vectors[:, :-1]
    item = recommender.items["i3"]
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(vectors[item])
    cosine = np.divide(vectors @ vectors[item], lengths, out=np.full(len(vectors), -1.0), where=lengths > 0)

    found = recommender.similar("i3", 5)

    order = [number for number in np.argsort(-cosine, kind="stable") if number not in (0, item)][:5]
    assert found.items == [recommender.item_ids[number - 1] for number in order]
    assert found.scores == pytest.approx(cosine[order], abs=1e-5)


@pytest.mark.parametrize(("name", "options"), [("tisasrec", {}), *REQUEST_TIME.items()])
def test_an_explanation_is_what_the_answer_loses_without_an_event(prepared, tmp_path, name, options):
    recommender = Recommender.load(save(name, prepared, tmp_path, options=options))
    history, times = ["i3", "unknown", *(f"i{n}" for n in range(14))], [float(1000 * n * n) for n in range(16)]
    item, user = "i20", "u5"

    def score(places):
        given = {"history": [history[p] for p in places], "times": [times[p] for p in places], "at": 300_000.0}
        answer = recommender.recommend(**given, k=40, user=user)
        return answer.scores[answer.items.index(item)]

    drops = recommender.explain(Request(history=history, times=times, at=300_000.0, user=user), item)

    whole = score(range(16))
    expected = [whole - score([p for p in range(16) if p != left_out]) for left_out in range(16)]
    assert drops == pytest.approx(expected, abs=1e-5)
    assert drops[:4] == [0.0] * 4  # the model sees 12 events
    assert max(map(abs, drops[4:])) > 1e-3
    with pytest.raises(ValueError, match="'nothing' is unknown"):
        recommender.explain(Request(history=history), "nothing")
