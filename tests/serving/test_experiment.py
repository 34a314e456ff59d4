"""What was shown is logged, feedback finds it, users keep their version, and the comparison finds the truth."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import requests
from scipy import stats
from support import running, save, service

from seqrec.__main__ import main
from seqrec.artifacts import MODEL_CARD, read_json, write_json
from seqrec.config import ConfigError, RegisterConfig, ServeConfig
from seqrec.serving import http
from seqrec.serving.batcher import Served
from seqrec.serving.events import Clicks, Event, Shown
from seqrec.serving.experiment import compare, in_candidate
from seqrec.serving.recommender import Request

USERS = [f"u{number}" for number in range(4000)]


def test_a_version_of_a_folder_changes_with_weights_and_counts(prepared, tmp_path):
    """Every training writes a folder of the same name."""
    first, _ = (save("sasrec", prepared, tmp_path / name / "finetuned") for name in "ab")
    counted = tmp_path / "c" / "finetuned"
    shutil.copytree(first, counted)
    card = read_json(first / MODEL_CARD)
    write_json(counted / MODEL_CARD, card | {"counts": {"sha256": "of a count term"}})
    shutil.copytree(first, tmp_path / "d" / "finetuned")
    names = [http.version_of(str(tmp_path / name / "finetuned"), RegisterConfig()) for name in "abcd"]

    assert len(set(names)) == 3
    assert names[0] == names[3]
    assert all(name.startswith("finetuned-") for name in names)
    assert http.version_of("models:/seqrec-ml-100k/4", RegisterConfig()) == "4"
    options = ServeConfig(port=0, saved=str(first), candidate=str(first), share=0.5)
    with pytest.raises(ConfigError, match=r"candidate: .* is the champion itself"):
        http.serve(dataset="tiny", config=RegisterConfig(), options=options)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_users_has_the_candidate_and_keeps_it(share):
    chosen = {user for user in USERS if in_candidate(user, "4", share)}

    assert len(chosen) / len(USERS) == pytest.approx(share, abs=4 * math.sqrt(0.25 / len(USERS)))
    assert chosen <= {user for user in USERS if in_candidate(user, "4", min(1.0, share + 0.2))}
    other = {user for user in USERS if in_candidate(user, "5", share)}
    assert len(chosen & other) / len(USERS) == pytest.approx(share**2, abs=0.04)  # divided anew


def simulated(generator, rates, users=100):
    """Clicks of users who differ from each other in how often they come and how often they click."""
    found = []
    for version, rate in rates.items():
        answers = generator.geometric(0.1, users)
        own = generator.beta(4 * rate, 4 * (1 - rate), users)
        clicked = generator.binomial(answers, own)
        found += [Clicks(version, str(n), int(answers[n]), int(clicked[n])) for n in range(users)]
    return found


def test_the_interval_holds_the_true_difference_as_often_as_it_says():
    generator, held = np.random.default_rng(0), 0
    for _ in range(400):
        found = compare(simulated(generator, {"1": 0.2, "2": 0.25}), "1", "2")
        held += found.low <= 0.05 <= found.high
    assert found.champion.rate == pytest.approx(0.2, abs=0.05)
    assert held / 400 == pytest.approx(0.95, abs=0.03)  # 0.58 if answers counted as independent


def test_with_few_users_the_interval_is_welchs():
    clicked = {"1": [1, 0, 0, 0, 0], "2": [0, 1, 1]}
    found = compare([Clicks(v, str(n), 1, c) for v, own in clicked.items() for n, c in enumerate(own)], "1", "2")

    welch = stats.ttest_ind(clicked["2"], clicked["1"], equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((welch.low, welch.high))


def test_clicks_are_joined_by_answer_item_and_user(store, capsys, caplog):
    def shown(number, user, version, at=10.0):
        return Shown(recommendation_id=f"r{number}", user=user, version=version, items=["a", "b"], at=at)

    def acted(number, user, item, kind="buy"):
        name = f"r{number}"
        return Event(event_id=f"{name}{item}", user=user, item=item, kind=kind, at=11.0, recommendation_id=name)

    before = shown(0, "u", "1", at=1.0)  # the other version was not served yet
    store.show([before, *(shown(n, "u", "1") for n in (1, 2, 3)), shown(4, "v", "1"), shown(5, "w", "2")])
    store.show([shown(6, None, "2"), shown(7, "x", "3"), shown(8, None, "2", at=0.5)])
    store.add([acted(0, "u", "a"), acted(1, "u", "a"), acted(1, "u", "b"), acted(2, "u", "c"), acted(3, "v", "a")])
    store.add([acted(4, "v", "a", kind="hide"), acted(5, "w", "b")])

    assert sorted(store.clicks("1", "2"), key=lambda c: c.user) == [
        Clicks("1", "u", 3, 1),
        Clicks("1", "v", 1, 0),
        Clicks("2", "w", 1, 1),
    ]
    assert main(["events", "compare", "--store", str(store.engine.url), "--versions", "1,2"]) == 0
    said = capsys.readouterr().out
    assert "0.2500" in said
    assert "difference +0.7500, no interval" in said
    for versions, message in (
        ("1", "--versions must be CHAMPION,CANDIDATE"),
        ("1,1", "--versions must be CHAMPION,CANDIDATE"),
        ("1, 9", "no user was shown a list of version 9"),
    ):
        assert main(["events", "compare", "--store", str(store.engine.url), "--versions", versions]) == 1
        assert message in caplog.text


def test_two_versions_behind_one_service(recommender, other, store):
    users = USERS[:20]
    own = {user: other if in_candidate(user, "2", 0.5) else recommender for user in users}
    options = ServeConfig(share=0.5)
    api = http.app(lambda: recommender, lambda: "1", options, store=store, candidate=Served(other, "2"))
    with running(api) as address:

        def ask(user, **body):
            body = {"history": ["i1", "i2"], "user": user, "k": 3, **body}
            return requests.post(f"{address}/recommend", json=body, timeout=10).json()

        answers = {user: ask(user) for user in users}
        for user, answer in answers.items():
            assert answer["source"] == own[user].name
            assert answer["items"] == own[user].recommend(["i1", "i2"], 3, user=user).items
        assert ask(None)["version"] == "1"
        batch = {"requests": [{"history": ["i1"], "user": user} for user in users]}
        several = requests.post(f"{address}/recommend/batch", json=batch, timeout=10).json()["answers"]
        assert [a["version"] for a in several] == [answers[user]["version"] for user in users]
        ids = [a["recommendation_id"] for a in (*answers.values(), *several)]
        assert len(set(ids)) == 40
        chosen = {user: answer for user, answer in answers.items() if answer["version"] == "2"}
        events = [
            {"event_id": u, "user": u, "item": a["items"][1], "recommendation_id": a["recommendation_id"]}
            for u, a in chosen.items()
        ]
        requests.post(f"{address}/events", json={"events": events}, timeout=10).raise_for_status()
        found = requests.get(f"{address}/experiment", timeout=10).json()
        assert requests.put(f"{address}/experiment", json={"share": 2}, timeout=10).status_code == 422
        assert requests.put(f"{address}/experiment", json={"share": 0}, timeout=10).json() == {"share": 0}
        assert {ask(user)["version"] for user in users} == {"1"}
        forgotten = requests.delete(f"{address}/users/{min(chosen)}", timeout=10).json()
        assert forgotten == {"events": 1, "answers": 3}
        api.state.service.switch(other, "2")  # the candidate is promoted
        over = requests.get(f"{address}/experiment", timeout=10)
        assert (over.status_code, "is the champion" in over.json()["detail"]) == (404, True)
    assert found["candidate"]["rate"] == 0.5  # of two answers each, one
    assert found["candidate"]["users"] == found["candidate"]["answers"] / 2 == len(chosen)
    assert (found["champion"]["rate"], found["difference"], found["low"], found["high"]) == (0, 0.5, None, None)


def test_both_versions_can_be_asked_and_such_answers_are_not_logged(recommender, other, store):
    body = {"history": ["i1", "i2"], "user": "u", "k": 3}
    question = {"history": ["i1", "i2"], "item": "i5", "user": "u"}
    with service(recommender, version="1", store=store, candidate=Served(other, "2"), share=1.0) as address:

        def post(path, body):
            return requests.post(address + path, json=body, timeout=10)

        assert requests.get(f"{address}/health", timeout=10).json()["candidate"] == "2"
        for by, version, model in (("champion", "1", recommender), ("candidate", "2", other)):
            answer = post("/recommend", {**body, "by": by}).json()
            assert (answer["version"], answer["items"]) == (version, model.recommend(["i1", "i2"], 3, user="u").items)
            drops = post("/explain", {**question, "by": by}).json()["drops"]
            assert drops == pytest.approx(model.explain(Request(history=["i1", "i2"], user="u"), "i5"))
        assert post("/explain", {**question, "item": "nothing"}).status_code == 404
        found = requests.get(f"{address}/experiment", timeout=10).json()
        assert (found["candidate"]["answers"], found["candidate"]["rate"], found["low"]) == (0, None, None)
    with service(recommender) as address:
        assert post("/recommend", {**body, "by": "candidate"}).status_code == 404


def test_answers_in_the_queue_are_written_at_the_end_and_what_is_too_much_is_counted(recommender, store, monkeypatch):
    monkeypatch.setattr("seqrec.serving.async_store.WRITE_EVERY_S", 100)
    monkeypatch.setattr("seqrec.serving.async_store.MOST_WAITING", 1)
    with service(recommender, version="1", store=store) as address:
        for _ in range(3):
            requests.post(f"{address}/recommend", json={"history": ["i1"], "user": "u"}, timeout=10)
        metrics = requests.get(f"{address}/metrics", timeout=10).text

    assert "seqrec_impressions_lost_total 2.0" in metrics
    assert store.clicks("1", "2") == [Clicks("1", "u", 1, 0)]
