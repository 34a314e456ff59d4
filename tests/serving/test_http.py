"""The service over real HTTP: answers, odd requests, batches, metrics, and a champion that changes meanwhile."""

import asyncio
import base64
import copy
import hashlib
import html
import itertools
import json
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import requests
from support import running, service, until

from seqrec.config import ServeConfig
from seqrec.serving import http, schemas
from seqrec.serving.batcher import Batcher, PassError, Served
from seqrec.serving.metrics import Metrics
from seqrec.serving.recommender import Request
from seqrec.serving.rules import Attribute, Attributes


def ask(address, **body):
    return requests.post(f"{address}/recommend", json=body, timeout=10)


def test_an_answer_is_the_recommenders(address, recommender):
    answer = ask(address, history=["i1", "i2", "unheard of"], k=3, exclude=["i5"], user="u1").json()

    expected = recommender.recommend(["i1", "i2", "unheard of"], 3, exclude=["i5"], user="u1")
    assert answer["items"] == expected.items
    assert answer["scores"] == pytest.approx(expected.scores, abs=1e-5)
    assert (answer["source"], answer["unknown"], answer["version"]) == ("sasrec", 1, "7")


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"history": ["i1"], "k": 0}',
        json.dumps({"history": ["i1"], "k": schemas.MAX_ITEMS + 1}),
        '{"history": ["i1"], "times": [1, 2]}',
        '{"history": ["i1"], "times": [NaN]}',
        '{"history": ["i1"], "K": 5}',
        pytest.param(json.dumps({"history": ["i"] * (schemas.MAX_HISTORY + 1)}), id="too long"),
        '{"history": "\\ud800"}',
        "{",
        pytest.param(b"\xff\xfe", id="no text"),
    ],
)
def test_a_malformed_body_is_refused_with_the_reason(address, text):
    body, headers = text if isinstance(text, bytes) else text.encode(), {"content-type": "application/json"}
    for path, data in (("", body), ("/batch", body), ("/batch", b'{"requests": [' + body + b"]}")):
        answer = requests.post(f"{address}/recommend{path}", data=data, headers=headers, timeout=10)
        assert answer.status_code in (400, 422)
        assert answer.json()["detail"]


def test_ids_may_be_whole_numbers():
    body = {"history": [5, "6"], "user": 7, "exclude": [8], "filter": {"year": [1990]}, "items_text": {"a": {"b": 9}}}
    query = schemas.Query.model_validate(body)
    event = schemas.UserEvent.model_validate({"event_id": 1, "user": 2, "item": 3})

    assert (query.history, query.user, query.exclude) == (["5", "6"], "7", ["8"])
    assert (query.filter, query.items_text) == ({"year": ["1990"]}, {"a": {"b": "9"}})
    assert (event.event_id, event.user, event.item) == ("1", "2", "3")
    for wrong in (5.0, True, None):
        with pytest.raises(ValueError, match="should be a valid string"):
            schemas.Query.model_validate({"history": [wrong]})


def test_who_cannot_be_answered_or_makes_a_pass_fail_fails_alone(recommender):
    failing, sizes = copy.copy(recommender), []
    wrong = Request(history=["i1"], filter={"colour": ["red"]})

    def answer(requests):
        sizes.append(len(requests))
        if any(request.diversity for request in requests):
            raise RuntimeError("the weights are of another model")
        return recommender.answer(requests)

    async def ask():
        batcher = Batcher(Served(failing, "1"), 8, lambda *_: None)
        futures = batcher.answer([*(Request(history=["i1"], diversity=float(n == 1)) for n in range(4)), wrong])
        working = asyncio.create_task(batcher.run())
        found = await asyncio.gather(*futures, *batcher.answer([Request(history=["i2"])]), return_exceptions=True)
        working.cancel()
        return found

    failing.answer = answer
    found = asyncio.run(ask())

    assert [type(one) for one in found] == [tuple, PassError, tuple, tuple, ValueError, tuple]
    assert found[5][0].items == recommender.recommend(["i2"]).items
    assert sizes == [5, 1, 1, 1, 1, 1]


def test_passes_take_a_list_of_each_request_in_turn_up_to_a_cost(recommender):
    """Whoever asks for one list does not wait for somebody's hundred, nor for lists that take long."""
    passes = []

    async def ask():
        batcher = Batcher(Served(recommender, "1"), 8, lambda requests, _: passes.append([r.k for r in requests]))
        many = batcher.answer([Request(history=["i1"], k=1)] * 30)
        dear = batcher.answer([Request(history=["i1"], k=999, diversity=1)] * 3)
        gone = batcher.answer([Request(history=["i1"], k=2)] * 30)
        one = batcher.answer([Request(history=["i1"], k=3)])
        for future in gone:
            future.cancel()
        working = asyncio.create_task(batcher.run())
        await asyncio.gather(*many, *dear, *one)
        working.cancel()

    asyncio.run(ask())

    assert passes[:2] == [[1, 999, 3, 1, 999], [1, 999, *[1] * 6]]  # each 999 costs more than half of a pass
    assert max(map(len, passes)) == 8
    assert sum(map(len, passes)) == 34


def test_new_champions_are_served_under_load_without_a_failed_request(other, recommender):
    champions, newest = [other, recommender], [1]  # even versions, odd versions

    def ask_until_it_is_served(version):
        answers = []
        while not answers or answers[-1]["version"] != version:
            answer = ask(address, history=["i1", "i2"], k=3)
            assert answer.status_code == 200
            answers.append(answer.json())
            assert len(answers) < 5_000
        return answers

    app = http.app(lambda: champions[newest[0] % 2], lambda: str(newest[0]), ServeConfig(poll_s=0.01))
    with running(app) as address, ThreadPoolExecutor(4) as askers:
        answers = []
        for number in range(1, 9):
            newest[0] = number
            answers += itertools.chain(*askers.map(ask_until_it_is_served, [str(number)] * 4))
        text = requests.get(f"{address}/metrics", timeout=10).text

    best = [champion.recommend(["i1", "i2"], 3).items for champion in champions]
    assert best[0] != best[1]
    assert all(answer["items"] == best[int(answer["version"]) % 2] for answer in answers)
    assert 'seqrec_model{name="fpmc",version="8"} 1.0' in text
    assert 'version="7"' not in text


def test_without_a_champion_it_is_alive_and_waits_for_one(recommender, store):
    newest, model = [""], "/v2/models/seqrec"
    app = http.app(lambda: recommender, lambda: newest[0], ServeConfig(poll_s=0.01), store=store)
    with running(app) as address:

        def get(path):
            return requests.get(f"{address}{path}", timeout=10)

        for path in ("/ready", "/v2/health/ready"):
            assert (get(path).status_code, get(path).json()) == (503, {"ready": False})
        state = get("/health").json()
        assert (state["status"], state["version"], state["problem"]) == ("waiting", "", "no champion yet")
        assert {get(path).status_code for path in ("/", "/metrics", "/docs", "/v2/health/live")} == {200}
        paths = ("/popular", "/similar/i1", "/items?search=a", "/attributes", "/trending", model, f"{model}/ready")
        answers = [get(path) for path in paths]
        for answer in [*answers, ask(address, history=["i1"]), ask(address, user="u1"), ask(address)]:
            assert (answer.status_code, answer.json()) == (503, {"detail": "no champion yet"})
            assert answer.headers["Retry-After"] == "1"
        newest[0] = "1"
        until(lambda: get("/ready").ok)
        assert ask(address, history=["i1"]).json()["version"] == "1"
        assert get("/health").json()["status"] == "ok"
        assert 'seqrec_model{name="sasrec",version="1"} 1.0' in get("/metrics").text
    with pytest.raises(ValueError, match="no champion yet: run `make repro` first"):
        http.app(lambda: recommender, lambda: "", ServeConfig(poll_s=0))


def test_a_version_that_cannot_be_loaded_is_told_and_tried_again(recommender, caplog):
    newest = mock.Mock(return_value="1")
    load = mock.Mock(return_value=recommender)

    def health(address, status, version):
        def reached():
            state = requests.get(f"{address}/health", timeout=10).json()
            return (state["status"], state["version"]) == (status, version) and state

        return until(reached)["problem"]

    with running(http.app(load, newest, ServeConfig(poll_s=0.01))) as address:
        assert health(address, "ok", "1") == ""
        newest.side_effect = OSError("down")  # the registry does not answer
        assert health(address, "behind", "1") == "OSError: down"
        newest.side_effect = None
        assert health(address, "ok", "1") == ""
        caplog.clear()
        load.side_effect = KeyError("filter_seen")
        newest.return_value = "2"
        assert health(address, "behind", "1") == "KeyError: 'filter_seen'"
        assert "seqrec_behind 1.0" in requests.get(f"{address}/metrics", timeout=10).text
        assert ask(address, history=["i1"]).json()["version"] == "1"
        time.sleep(0.1)  # ten more looks
        assert sum("version 1 stays" in record.getMessage() for record in caplog.records) == 1
        load.side_effect = None
        assert health(address, "ok", "2") == ""


def test_a_pass_that_fails_is_a_503_and_the_next_one_works(recommender, caplog):
    failing = copy.copy(recommender)
    failing.answer = mock.Mock(side_effect=[RuntimeError("out of memory"), [recommender.recommend(["i1"])]])
    failing.similar = mock.Mock(side_effect=ImportError("no torch"))

    with service(failing) as address:
        apart = requests.get(f"{address}/similar/i1", timeout=10)
        assert (apart.status_code, "the reason is in the log" in apart.json()["detail"]) == (503, True)
        assert ask(address, history=["i1"]).status_code == 503
        assert caplog.text.count("Traceback") == 2  # one a failure
        assert ask(address, history=["i1"]).status_code == 200


def test_health_and_metrics_tell_what_was_served(recommender):
    with service(recommender) as address:
        ask(address, history=["i1", "what", "ever"])
        ask(address, history=[])
        health = requests.get(f"{address}/health", timeout=10).json()
        lines = requests.get(f"{address}/metrics", timeout=10).text.splitlines()

    served = {"status": "ok", "model": "sasrec", "version": "7", "candidate": "", "items": 40, "users": 60}
    assert health == served | {"problem": ""}
    assert not any("_created" in line for line in lines)  # a second series of each counter
    assert 'seqrec_requests_total{source="sasrec"} 1.0' in lines
    assert 'seqrec_requests_total{source="popularity"} 1.0' in lines
    assert "seqrec_unknown_events_total 2.0" in lines
    assert "seqrec_history_events_sum 3.0" in lines
    assert sum(float(line.split()[-1]) for line in lines if line.startswith("seqrec_history_popularity_total")) == 1
    expected = next(float(line.split()[-1]) for line in lines if line.startswith("seqrec_training_events_per_user"))
    assert expected == pytest.approx(recommender.counts.sum().item() / 60)


def test_each_decile_of_popularity_had_a_tenth_of_the_training(recommender):
    metrics = Metrics(served := Served(recommender, "1"))
    metrics.switch(served)

    counts = dict(zip(recommender.item_ids, recommender.counts[1:].tolist(), strict=True))
    events = [[counts[item_id] for item_id, its in metrics.decile_of.items() if its == decile] for decile in range(10)]
    largest = max(counts.values()) / sum(counts.values())
    assert [sum(some) / sum(counts.values()) for some in events] == pytest.approx([0.1] * 10, abs=largest)
    assert min(events[0]) >= max(events[9])


def test_the_pages_for_people_need_no_other_server(address):
    for path in ("/", "/docs"):
        page = requests.get(f"{address}{path}", timeout=10).text
        assets = [asset for asset in re.findall(r'(?:src|href)="([^"]+)"', page) if asset != "data:,"]
        assert len(assets) >= 2
        for asset in assets:
            assert asset.startswith("/")
            assert requests.get(f"{address}{asset}", timeout=10).status_code == 200
    for file in http.PAGE.iterdir():
        assert "//" not in re.sub(r"^//.*|; //.*", "", file.read_text(), flags=re.M)  # but comments: no address


def test_the_page_of_the_api_offers_a_request_that_is_answered(address):
    schemas = requests.get(f"{address}/openapi.json", timeout=10).json()["components"]["schemas"]
    (example,) = schemas["Query"]["examples"]
    assert requests.post(f"{address}/recommend", json=example, timeout=10).status_code == 200


def test_browsers_take_answers_for_what_they_are_called_and_load_nothing_from_elsewhere(address):
    for path in ("/", "/docs", "/redoc", "/docs/oauth2-redirect", "/popular", "/page/page.js", "/nothing"):
        answer = requests.get(f"{address}{path}", timeout=10)
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert policy["frame-ancestors"] == "'none'"
        assert "http" not in "".join(policy.values())
        scripts = policy.get("script-src", policy["default-src"]).split()
        for script in re.findall(r"<script(?: type=.*?)?>(.+?)</script>", answer.text, re.DOTALL):
            assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in scripts
        assert "'unsafe-inline'" not in scripts
        assert ("'self'" in scripts) == (path in ("/", "/docs", "/redoc", "/docs/oauth2-redirect"))


def test_items_are_found_by_title_and_titles_come_to_who_asks_for_them(recommender):
    titled = copy.copy(recommender)
    titled.titles = {"i3": "The Third", "i30": "Thirty"}
    with service(titled) as address:

        def found(text, k=10):
            got = requests.get(f"{address}/items", params={"search": text, "k": k}, timeout=10).json()
            return [(item["item"], item["title"]) for item in got["items"]]

        assert found("THI") == sorted([("i3", "The Third"), ("i30", "Thirty")], key=lambda i: recommender.items[i[0]])
        assert found("i3", 1) == [("i3", "The Third")]
        assert len(found("i", 7)) == 7
        named = ask(address, history=["i1", "i2"], k=40, titles=True).json()
        assert named["titles"] == [titled.titles.get(item, "") for item in named["items"]]
        assert "Thirty" in named["titles"]
        assert ask(address, history=["i1"]).json()["titles"] is None


CHROMIUM = shutil.which("chromium")


def dom(address, profile):
    """Return the page as the browser has it after its scripts."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    command = [CHROMIUM, *flags, "--virtual-time-budget=3000", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_shows_titles_scores_filters_and_two_versions_in_a_browser(recommender, other, tmp_path):
    first, second = copy.copy(recommender), copy.copy(other)
    first.attributes = Attributes({"genre": Attribute(["Drama, Comedy", "Drama", None])})
    first.titles = second.titles = {item_id: f"<b>{item_id}</b>" for item_id in recommender.item_ids}
    with service(first, candidate=Served(second, "8")) as address:
        history = f"history=i1&history=i2&history={'q' * 300}"  # the last is too long to search for
        page = dom(f"{address}/?{history}&similar=i3&search=nowhere", tmp_path / "profile")

    champion, candidate = page.split('class="candidate"')
    for part, own in ((champion, first), (candidate, second)):
        shown = re.findall(
            r'<li><bdi title="([^"]*)"[^>]*>([^<]*)</bdi><span[^>]*>([^<]*)</span><button[^>]*>why', part
        )
        answer = own.recommend(["i1", "i2"], 10)
        assert [item for item, _, _ in shown] == answer.items
        assert [score for _, _, score in shown] == [f"{score:.3f}" for score in answer.scores]
        assert [html.unescape(title) for _, title, _ in shown] == [f"<b>{item}</b>" for item in answer.items]
    assert re.findall(r"<option[^>]*>([^<]*)", champion) == ["any", "Comedy", "Drama"]
    assert "sasrec, version 7, 40 items" in page
    assert [name in page for name in ("Champion, version 7", "Candidate, version 8")] == [True, True]
    assert re.search(r"\d+ of 10 items are in both lists", page)
    assert "only here" in page or "no. 1 in the other list" in page
    assert "No item fits “nowhere”." in page
    assert "Similar to &lt;b&gt;i3&lt;/b&gt;" in page  # the address says what is shown
    (popular,) = re.findall(r'<details id="popular">(.*?)</details>', page)
    assert re.findall(r'title="(i\d+)"', popular) == recommender.popular(10).items
    assert '<details id="trending" hidden' in page  # there is no store
