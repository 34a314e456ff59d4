"""What is refused before the model is asked: keys, rates, sizes, queues, time; and how the service ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests
import uvicorn
from support import running, save

from seqrec.__main__ import main
from seqrec.serving import guards, http, keys
from seqrec.serving.guards import Limits, Rates
from seqrec.serving.recommender import Recommender


@pytest.fixture(scope="module")
def recommender(prepared, tmp_path_factory):
    return Recommender.load(save("sasrec", prepared, tmp_path_factory.mktemp("served"), model="sasrec"))


def service(recommender, **limits):
    return running(http.app(lambda: recommender, lambda: "1", poll_s=0, limits=Limits(**limits)))


def ask(address, key=None, path="/recommend", **options):
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return requests.post(f"{address}{path}", json={"history": ["i1"]}, headers=headers, timeout=10, **options)


class Held:
    """A recommender that waits."""

    def __init__(self, recommender):
        self.recommender, self.go, self.asked = recommender, threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self.recommender, name)

    def answer(self, requests):
        self.asked.set()
        self.go.wait(10)
        return self.recommender.answer(requests)


def test_only_valid_keys_are_answered_and_the_file_is_followed(recommender, tmp_path):
    file = tmp_path / "keys.json"
    app, admin = keys.add(file, "app"), keys.add(file, "boss", admin=True)
    with service(recommender, keys=file) as address:
        assert ask(address, app).status_code == ask(address, admin).status_code == 200
        for wrong in (None, "", "Bearer", app[:-1], f"{app} ", "ü"):
            answer = ask(address, wrong and wrong.encode().decode("latin-1"))
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json"):
            assert requests.get(address + path, timeout=10).status_code == 200
        for path in ("/popular", "/similar/i1"):
            assert requests.get(address + path, timeout=10).status_code == 401
        assert (
            requests.put(f"{address}/experiment", headers={"Authorization": f"Bearer {app}"}, timeout=9).status_code
            == 403
        )

        keys.expire(file, "app")
        fresh = keys.add(file, "app", days=1)
        assert ask(address, app).status_code == 401
        assert ask(address, fresh).status_code == 200
        file.write_text("{")
        assert ask(address, fresh).status_code == 200  # what was known stays
    assert app not in file.read_text()


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
    run("revoke", *flags)
    assert keys.Keys(file).find(first) is keys.Keys(file).find(second) is None
    shown = run("show", "--keys-file", str(file))
    assert shown.count("app") == 2
    assert first not in shown + file.read_text() + caplog.text
    assert main(["keys", "revoke", "--keys-file", str(file), "--name", "nobody"]) == 1
    assert main(["keys", "add", "--keys-file", str(file)]) == 1
    assert main(["keys", "cook", "--keys-file", str(file)]) == 1
    for days in ("nan", "inf", "-1", "1e300"):
        assert main(["keys", "add", *flags, "--days", days]) == 1


WRITER = """
import sys
from pathlib import Path
from seqrec.serving import keys
for number in range(25):
    keys.add(Path(sys.argv[1]), f"{sys.argv[2]}-{number}")
"""


def test_two_processes_lose_no_key_and_a_revoked_key_stays_so(tmp_path):
    file = tmp_path / "keys.json"
    revoked = keys.add(file, "gone")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITER, str(file)]
    writers = [subprocess.Popen([*command, name], env=environment) for name in ("a", "b")]
    while len(keys.read(file)) < 3:
        assert any(writer.poll() is None for writer in writers)
        time.sleep(0.001)
    keys.expire(file, "gone")
    assert [writer.wait(60) for writer in writers] == [0, 0]

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
    "content", ["[]", '{"keys": 5}', '{"keys": [5]}', '{"keys": [{"name": "a", "sha256": "\u00fc"}]}']
)
def test_a_file_of_something_else_is_no_key_file(tmp_path, caplog, content):
    (tmp_path / "keys.json").write_text(content)
    for action in ("show", "add"):
        assert main(["keys", action, "--keys-file", str(tmp_path / "keys.json"), "--name", "a"]) == 1
    assert (tmp_path / "keys.json").read_text() == content


def test_a_caller_has_a_rate_of_its_own(monkeypatch):
    now = [0.0]
    rates = Rates(2.0, lambda: now[0])

    assert [rates.wait("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]  # two seconds' requests at once
    assert rates.wait("b") == 0
    now[0] = 0.5
    assert [rates.wait("a"), rates.wait("a")] == [0, 0.5]
    now[0] = 100.0
    assert [rates.wait("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]  # no more than that, however long it waited
    monkeypatch.setattr(guards, "CALLERS", 1)
    rates.wait("c")
    assert rates.wait("a") == 0  # forgotten: at most so many are known
    assert Rates(0.1).wait("slow") == 0


def test_above_the_rate_it_is_429(recommender, tmp_path):
    file = tmp_path / "keys.json"
    one, other = keys.add(file, "one"), keys.add(file, "other")
    with service(recommender, keys=file, rate=0.001) as address:
        assert [ask(address, one).status_code for _ in range(2)] == [200, 429]
        assert int(ask(address, one).headers["Retry-After"]) > 900
        assert ask(address, other).status_code == 200
        assert requests.get(f"{address}/health", timeout=10).status_code == 200


def test_a_large_body_is_refused_before_it_is_read(recommender):
    with service(recommender, body=1000) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(b"POST /recommend HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        chunks = (b" " * 100 for _ in range(50))
        assert requests.post(f"{address}/recommend", data=chunks, timeout=10).status_code == 413
        chunks = (part for part in (b'{"history":', b' ["i1"]}'))
        json = {"content-type": "application/json"}
        assert requests.post(f"{address}/recommend", data=chunks, headers=json, timeout=10).status_code == 200


def test_above_the_queue_it_is_503_and_says_when_to_come_back(recommender):
    held, statuses = Held(recommender), []
    api = http.app(lambda: held, lambda: "1", poll_s=0, limits=Limits(queue=2))
    with running(api) as address:
        threads = [threading.Thread(target=lambda: statuses.append(ask(address).status_code)) for _ in range(3)]
        threads[0].start()
        assert held.asked.wait(10)
        for thread in threads[1:]:
            thread.start()
        while api.state.service.batcher.queue.qsize() < 2:
            time.sleep(0.01)
        answer = ask(address)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert requests.get(f"{address}/health", timeout=10).status_code == 200
        held.go.set()
        for thread in threads:
            thread.join(10)
        metrics = requests.get(f"{address}/metrics", timeout=10).text
    assert statuses == [200] * 3
    assert 'seqrec_responses_total{status="200"} 3.0' in metrics
    assert 'seqrec_responses_total{status="503"} 1.0' in metrics


def test_what_takes_too_long_is_504_and_the_next_is_answered(recommender):
    held = Held(recommender)
    with service(held, timeout_s=0.2) as address:
        assert ask(address).status_code == 504
        held.go.set()
        assert ask(address).status_code == 200
        metrics = requests.get(f"{address}/metrics", timeout=10).text
    assert 'seqrec_responses_total{status="504"} 1.0' in metrics
    assert 'seqrec_responses_total{status="200"} 1.0' in metrics


def test_pages_of_other_origins_may_ask_only_if_named(recommender):
    headers = {"Origin": "https://shop.example", "Access-Control-Request-Method": "POST"}
    for origins, allowed in (((), None), (["https://shop.example"], "https://shop.example")):
        with running(http.app(lambda: recommender, lambda: "1", poll_s=0, origins=origins)) as address:
            answer = requests.options(f"{address}/recommend", headers=headers, timeout=10)
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_it_answers_on_while_it_drains(recommender):
    """After SIGTERM /ready says no and the rest goes on; a request that was under way at the end gets its answer."""
    held, answers = Held(recommender), []
    api = http.app(lambda: held, lambda: "1", poll_s=0)
    server = http.Server(uvicorn.Config(api, port=0, log_level="warning"), api.state.service, drain_s=0.5)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    assert requests.get(f"{address}/ready", timeout=10).json() == {"ready": True}
    slow = threading.Thread(target=lambda: answers.append(ask(address).status_code))
    slow.start()
    assert held.asked.wait(10)

    server.handle_exit(signal.SIGTERM, None)

    ready = requests.get(f"{address}/ready", timeout=10)
    assert (ready.status_code, ready.json()) == (503, {"ready": False})
    assert requests.get(f"{address}/health", timeout=10).status_code == 200
    while not server.should_exit:
        time.sleep(0.01)
    held.go.set()
    slow.join(10)
    thread.join(10)
    assert answers == [200]
    assert not thread.is_alive()
