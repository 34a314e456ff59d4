"""What is refused before the model is asked: keys, rates, sizes, queues, time; and how the service ends."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import requests
from support import running, service, until

from seqrec.__main__ import main
from seqrec.artifacts import read_json, write_json
from seqrec.config import ServeConfig
from seqrec.serving import http, keys, rates
from seqrec.serving.rates import Rates
from seqrec.serving.recommender import Request
from seqrec.serving.rules import Attribute, Attributes
from seqrec.serving.server import Server, bound
from seqrec.serving.service import cost_of_explanation


def ask(address, key=None):
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return requests.post(f"{address}/recommend", json={"history": ["i1"]}, headers=headers, timeout=10)


class Held:
    """A recommender that waits until it may go, and notes how many requests came together."""

    def __init__(self, recommender):
        self.recommender, self.sizes = recommender, []
        self.go, self.asked = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self.recommender, name)

    def answer(self, requests):
        self.sizes.append(len(requests))
        self.asked.set()
        self.go.wait(10)
        return self.recommender.answer(requests)


@pytest.fixture
def held(recommender):
    return Held(recommender)


def test_only_valid_keys_are_answered_and_the_file_is_followed(recommender, tmp_path, caplog):
    file = tmp_path / "keys.json"
    with pytest.raises(FileNotFoundError):
        http.app(lambda: recommender, lambda: "7", ServeConfig(keys=str(file)))
    app, admin = keys.add(file, "app"), keys.add(file, "boss", admin=True)
    with service(recommender, keys=str(file)) as address:
        assert ask(address, app).status_code == ask(address, admin).status_code == 200
        for wrong in (None, "", "Bearer", app[:-1], f"{app} ", "ü"):
            answer = ask(address, wrong and wrong.encode().decode("latin-1"))
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json"):
            assert requests.get(address + path, timeout=10).status_code == 200
        assert requests.head(address + "/health", timeout=10).status_code == 200
        for path in ("/popular", "/similar/i1"):
            assert requests.get(address + path, timeout=10).status_code == 401
        admins_alone = requests.put(f"{address}/experiment", headers={"Authorization": f"bearer {app}"}, timeout=9)
        assert admins_alone.status_code == 403

        keys.expire(file, "app")
        fresh = keys.add(file, "app", days=1)
        assert ask(address, app).status_code == 401
        assert ask(address, fresh).status_code == 200
        file.write_text("{")
        assert [ask(address, fresh).status_code for _ in range(3)] == [200] * 3  # what was known stays
        assert caplog.text.count("the keys cannot be read again") == 1


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--keep-days", "9", "keep_days has no effect without a store"),
        ("--share", "0.3", "share has no effect without a candidate"),
        ("--rate", "1e-9", "rate must be 0 or at least 0.001"),
        ("--port", "99999", "port must be at least 0 and at most 65535"),
        ("--host", "", "host must not be empty"),
        ("--host", "256.0.0.1", "cannot listen on host 256.0.0.1, port 8000"),
    ],
)
def test_an_odd_option_is_refused_by_its_name_before_anything_is_touched(flag, value, reason, caplog):
    assert main(["serve", flag, value]) == 1

    assert reason in caplog.text


def test_a_taken_port_is_an_error_and_nothing_is_announced(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 1

    assert f"port {port}: Address already in use; change them with --host and --port" in caplog.text
    assert "serving at" not in caplog.text


def test_a_port_that_is_taken_while_the_model_loads_is_an_error():
    with bound("127.0.0.1", 0) as first, bound("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        settings = SimpleNamespace(config=SimpleNamespace(backlog=1))
        with pytest.raises(ValueError, match=r"Address already in use; change them with --host and --port"):
            asyncio.run(Server.startup(settings, [second]))
    with pytest.raises(ValueError, match="metrics_port must differ from port"):
        ServeConfig(metrics_port=8000)


def test_keys_on_the_command_line(tmp_path, capsys, caplog):
    file = tmp_path / "keys.json"
    flags = ["--keys-file", str(file), "--name", "app"]

    def run(*arguments):
        assert main(["keys", *arguments]) == 0
        return capsys.readouterr().out.strip()

    first = run("add", *flags, "--admin")
    second = run("rotate", *flags, "--days", "2")
    found = keys.Keys(file)
    assert found.find(first).expires == pytest.approx(time.time() + 2 * 86_400, abs=60)
    assert (found.find(second).expires, found.find(second).admin) == (None, True)
    write_json(file, {"keys": [read_json(file)["keys"][1], read_json(file)["keys"][0] | {"expires": 0}]})
    run("rotate", *flags, "--days", "2")
    assert keys.Keys(file).find(first) is None  # it had expired, and stays so
    assert "1970-01-01" in run("show", "--keys-file", str(file))
    for option in (["--days", "7"], ["--admin"]):  # it does not wait for days
        assert main(["keys", "revoke", *flags, *option]) == 1
    assert keys.Keys(file).find(second) is not None
    run("revoke", *flags)
    assert main(["keys", "rotate", *flags]) == 1  # nothing is left that the new key could replace
    assert keys.Keys(file).find(first) is keys.Keys(file).find(second) is None
    shown = run("show", "--keys-file", str(file))
    assert shown.count("app") == 3
    assert first not in shown + file.read_text() + caplog.text
    assert main(["keys", "revoke", "--keys-file", str(file), "--name", "nobody"]) == 1
    assert main(["keys", "add", "--keys-file", str(file)]) == 1
    run("add", *flags)
    assert not keys.Keys(file).find(run("rotate", *flags)).admin  # as a revoked key was
    for days in ("nan", "inf", "-1", "1e300"):
        assert main(["keys", "add", *flags, "--days", days]) == 1


def add_keys(file, prefix):
    for number in range(25):
        keys.add(file, f"{prefix}-{number}")


def test_two_processes_lose_no_key_and_a_revoked_key_stays_so(tmp_path):
    file, fork = tmp_path / "keys.json", multiprocessing.get_context("fork")
    revoked = keys.add(file, "gone")
    writers = [fork.Process(target=add_keys, args=(file, name)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    until(lambda: len(keys.read(file)) >= 3)
    keys.expire(file, "gone")
    for writer in writers:
        writer.join(60)

    names = {f"{name}-{number}" for name in "ab" for number in range(25)}
    assert {key.name for key in keys.read(file)} == names | {"gone"}
    assert keys.Keys(file).find(revoked) is None


def test_two_changes_in_one_moment_are_both_noticed(tmp_path):
    """The clock of a file system has ticks of milliseconds."""
    file = tmp_path / "keys.json"
    secret = keys.add(file, "app")
    found = keys.Keys(file)
    then = file.stat().st_mtime_ns
    keys.expire(file, "app")
    os.utime(file, ns=(then, then))
    assert found.find(secret) is None


@pytest.mark.parametrize(
    "content", ["{", '{"keys": 5}', '{"keys": [5]}', '{"keys": [{"name": "a", "sha256": "\u00fc"}]}']
)
def test_a_file_of_something_else_is_no_key_file(recommender, tmp_path, content):
    file = tmp_path / "keys.json"
    file.write_text(content)
    for action in ("show", "add"):
        assert main(["keys", action, "--keys-file", str(file), "--name", "a"]) == 1
    assert file.read_text() == content
    with pytest.raises(ValueError, match=r"keys\.json"):
        http.app(lambda: recommender, lambda: "7", ServeConfig(keys=str(file)))


def test_a_caller_has_a_rate_of_its_own(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rates, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = Rates(2.0)

    assert [found.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]  # two seconds' requests at once
    assert found.take("b") == 0
    now[0] = 0.5
    assert [found.take("a"), found.take("a")] == [0, 0.5]
    now[0] = 100.0
    assert [found.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]  # no more than that, however long it waited
    monkeypatch.setattr(rates, "CALLERS", 1)
    found.take("c")
    assert found.take("a") == 0  # forgotten: at most so many are known
    assert Rates(0.1).take("slow") == 0


def test_a_dear_request_is_granted_whole_and_made_up_for_by_waiting(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(rates, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = Rates(1.0)

    assert (found.take("a"), found.take("a", 0.0, needed=0.0)) == (0, 0)  # a burst of two, of which one is left
    assert (found.take("a"), found.take("a", 8.0, needed=0.0)) == (0, 0)
    assert (found.take("a"), found.take("a", 8.0, needed=0.0)) == (9, 8)  # neither the next one, nor one beside it
    assert found.take("b") == 0
    clock[0] = 9.0
    assert found.take("a") == 0


@pytest.mark.parametrize(  # the other parts of the cost: test_attacks.py
    ("query", "number"),
    [
        ({"history": ["i1"] * 10_000}, 100),
        ({"allow": ["i1"] * 100_000}, 10),
        ({"boost": {"genres": {"a": 2}}}, 1_000),
        ({"items_text": {f"new {n}": {"title": "x"} for n in range(100)}}, 2),
    ],
)
def test_what_costs_too_much_is_413_and_less_of_it_is_not(recommender, query, number):
    known = copy.copy(recommender)
    known.attributes = Attributes({"genres": Attribute(["a"] * len(recommender.item_ids))})
    with service(known) as address:
        bodies = [{"requests": [{"history": ["i1"], **query}] * times} for times in (number, 1)]
        answers = [requests.post(f"{address}/recommend/batch", json=body, timeout=60) for body in bodies]

    assert [answer.status_code for answer in answers] == [413, 422 if "items_text" in query else 200]
    assert "the service allows 200 (max_cost)" in answers[0].json()["detail"]


def test_a_thousand_lists_of_ten_are_admitted_and_count_by_their_cost(recommender):
    body = {"requests": [{"history": ["i1", "i2"] * 15}] * 1_000}
    cost = sum(Request(history=query["history"]).cost for query in body["requests"])
    with service(recommender, rate=5) as address:
        answers = [requests.post(f"{address}/recommend/batch", json=body, timeout=60) for _ in range(2)]

    assert 100 < cost < 200
    assert [answer.status_code for answer in answers] == [200, 429]
    assert int(answers[1].headers["Retry-After"]) <= cost / 5


def test_above_the_rate_it_is_429(recommender, tmp_path):
    file = tmp_path / "keys.json"
    one, other = keys.add(file, "one"), keys.add(file, "other")
    with service(recommender, keys=str(file), rate=0.001) as address:
        assert [ask(address, one).status_code for _ in range(2)] == [200, 429]
        assert int(ask(address, one).headers["Retry-After"]) > 900
        assert ask(address, other).status_code == 200
        assert requests.get(f"{address}/health", timeout=10).status_code == 200


def test_a_large_body_is_refused_before_it_is_read(recommender):
    with service(recommender, max_body=1000) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(b"POST /recommend HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        refused = requests.post(f"{address}/recommend", data=b" " * 1001, timeout=10)
        assert refused.json() == {"detail": "the body has more than 1000 bytes: send less at once"}
        chunks = (b" " * 100 for _ in range(50))
        assert requests.post(f"{address}/recommend", data=chunks, timeout=10).status_code == 413


def test_above_the_queue_it_is_503_and_those_who_wait_share_a_pass(held):
    """An explanation is answered apart, and counts as waiting too."""
    api = http.app(lambda: held, lambda: "1", ServeConfig(max_queue=3))
    with running(api) as address, ThreadPoolExecutor() as pool:

        def explain():
            return requests.post(f"{address}/explain", json={"history": ["i1"], "item": "i2"}, timeout=10)

        first = pool.submit(ask, address)
        assert held.asked.wait(10)
        others = [pool.submit(ask, address), pool.submit(ask, address), pool.submit(explain)]
        until(lambda: api.state.service.waiting() == 3)
        answer = ask(address)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert explain().status_code == 503
        for path in ("/similar/1", "/items?search=a"):
            assert requests.get(f"{address}{path}", timeout=10).status_code == 503
        for path in ("/health", "/v2/models/seqrec"):  # they need no pass
            assert requests.get(f"{address}{path}", timeout=10).status_code == 200
        held.go.set()
        statuses = [sent.result().status_code for sent in (first, *others)]
        metrics = requests.get(f"{address}/metrics", timeout=10).text
        assert api.state.service.waiting() == 0
    assert (statuses, held.sizes) == ([200] * 4, [1, 2])
    assert 'seqrec_responses_total{status="200"} 5.0' in metrics
    assert 'seqrec_responses_total{status="503"} 4.0' in metrics


@pytest.mark.parametrize(("history", "events", "lists"), [(10, 50, 5), (1_000, 50, 25), (1_000, 400, 800)])
def test_an_explanation_costs_what_it_computes(recommender, history, events, lists):
    with service(recommender, max_cost=0.1) as address:
        refused = requests.post(f"{address}/explain", json={"history": ["i1"] * history, "item": "i2"}, timeout=60)
    assert refused.status_code == 413

    request = Request(history=["i1"] * history)
    assert cost_of_explanation(request, events) == pytest.approx(lists * request.cost)


def test_what_takes_too_long_is_504_and_the_next_is_answered(held):
    with service(held, timeout_s=0.2) as address:
        assert ask(address).status_code == 504
        held.go.set()
        assert ask(address).status_code == 200
        metrics = requests.get(f"{address}/metrics", timeout=10).text
    assert 'seqrec_responses_total{status="504"} 1.0' in metrics
    assert 'seqrec_responses_total{status="200"} 1.0' in metrics


def test_pages_of_other_origins_may_ask_only_if_named(recommender):
    headers = {"Origin": "https://shop.example", "Access-Control-Request-Method": "POST"}
    for origins, allowed in (("", None), ("https://a.example, https://shop.example", "https://shop.example")):
        with service(recommender, origins=origins) as address:
            answer = requests.options(f"{address}/recommend", headers=headers, timeout=10)
        assert answer.headers.get("access-control-allow-origin") == allowed
    for wrong in ("https://a.example, https://shop.example/", "shop.example", "https://a.example,"):
        with pytest.raises(ValueError, match=r"origins: '.*' is not one, such as https://shop.example"):
            ServeConfig(origins=wrong)


def test_it_answers_on_while_it_drains(held):
    """After SIGTERM /ready says no and the rest goes on; a request that was under way at the end gets its answer."""
    answers = []
    server = http.Server(http.app(lambda: held, lambda: "1", ServeConfig(drain_s=0.5)))
    thread = threading.Thread(target=server.run, args=[[http.bound("127.0.0.1", 0)]], daemon=True)
    thread.start()
    until(lambda: server.started)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    assert requests.get(f"{address}/ready", timeout=10).json() == {"ready": True}
    slow = threading.Thread(target=lambda: answers.append(ask(address).status_code))
    slow.start()
    assert held.asked.wait(10)

    server.handle_exit(signal.SIGTERM, None)

    ready = requests.get(f"{address}/ready", timeout=10)
    assert (ready.status_code, ready.json()) == (503, {"ready": False})
    assert requests.get(f"{address}/health", timeout=10).status_code == 200
    until(lambda: server.should_exit)
    held.go.set()
    slow.join(10)
    thread.join(10)
    assert answers == [200]
    assert not thread.is_alive()
