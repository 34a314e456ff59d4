"""What the service tells those who run it, line by line and span by span, and that no history is in it."""

from __future__ import annotations

import io
import json
import logging

import pytest
import requests
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support import running, service

from seqrec.config import ServeConfig
from seqrec.serving import http, keys, request_log, traces
from seqrec.serving.batcher import Served

PRIVATE = ("i1", "i2", "somebody", "some title", "some%20title")  # of the requests below
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def lines():
    """The stream that JSON lines go to."""
    root, stream = logging.getLogger(), io.StringIO()
    handler, level = logging.StreamHandler(stream), root.level
    others, root.handlers = root.handlers, [handler]
    root.setLevel(logging.INFO)
    request_log.write_json()
    yield stream
    root.handlers = others
    root.setLevel(level)


def call(address, key):
    """Send requests that hold a history, a user, a title or a key; return the answers."""
    body = {"history": ["i1", "i2"], "user": "somebody"}

    def send(method, path, json=None, **headers):
        headers = {"Authorization": f"Bearer {key}"} | headers
        return requests.request(method, address + path, json=json, headers=headers, timeout=9)

    return [
        send("POST", "/recommend", body, **{"X-Request-ID": "from-a-gateway"}),
        send("POST", "/recommend", {**body, "by": "candidate"}),
        send("POST", "/recommend", {"history": "i1"}),
        send("GET", "/items?search=some title"),
        send("GET", "/?history=i1&history=i2"),
        send("DELETE", "/users/somebody"),
        send("POST", "/recommend", body, **{"Authorization": "", "X-Request-ID": "i1 i2"}),
        send("GET", "/nowhere/somebody"),
        send("GET", "/similar/page/health"),
        send("GET", "/popular", traceparent=CALLER),
        send("GET", "/health"),
    ]


def test_a_request_is_a_line_of_json_and_a_span_without_history_user_and_key(recommender, store, tmp_path, lines):
    key, exporter = keys.add(tmp_path / "keys.json", "app", admin=True), InMemorySpanExporter()
    options = ServeConfig(keys=str(tmp_path / "keys.json"), log_format="json")
    api = http.app(lambda: recommender, lambda: "7", options, store=store, candidate=Served(recommender, "8"))
    traces.trace(api, SimpleSpanProcessor(exporter))
    with running(api) as address:
        answers = call(address, key)
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    found = [line for line in found if line["message"] == "request"]
    spans = exporter.get_finished_spans()

    assert [(line["method"], line["route"], line["status"], line["version"]) for line in found] == [
        ("POST", "/recommend", 200, "7"),
        ("POST", "/recommend", 200, "8"),
        ("POST", "/recommend", 422, ""),
        ("GET", "/items", 200, ""),
        ("GET", "/", 200, ""),
        ("DELETE", "/users/{user:path}", 200, ""),
        ("POST", "/recommend", 401, ""),
        ("GET", "", 404, ""),
        ("GET", "/similar/{item:path}", 404, ""),
        ("GET", "/popular", 200, ""),
        ("GET", "/health", 200, ""),
    ]
    assert [line["request_id"] for line in found] == [answer.headers["X-Request-ID"] for answer in answers]
    assert found[0]["request_id"] == "from-a-gateway"
    assert all(line["milliseconds"] > 0 and line["time"].endswith("+00:00") for line in found)
    assert [span.name for span in spans][:4] == ["POST /recommend"] * 3 + ["GET /items"]
    assert [span.name for span in spans][-2:] == ["GET /similar/{item:path}", "GET /popular"]  # none of /health
    assert f"{spans[-1].context.trace_id:032x}" == CALLER.split("-")[1]
    assert spans[-1].resource.attributes["service.name"] == "seqrec"
    text = " ".join(span.to_json() for span in spans)
    assert "DELETE /users/{user:path}" in text
    for private in (*PRIVATE, key):
        assert private not in lines.getvalue()
        assert private not in text


def test_messages_and_tracebacks_are_json_without_secrets(lines):
    try:
        raise OSError("postgresql://me:hidden-word@host/db")
    except OSError:
        logging.getLogger("seqrec").exception("two\nlines of https://me:hidden-word@host")

    (line,) = lines.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("error", "seqrec", "two\nlines of https://***@host")
    assert "OSError" in found["exception"]
    assert "hidden-word" not in line


@pytest.mark.parametrize("variable", traces.VARIABLES)
def test_traces_are_sent_only_where_the_environment_names_a_collector(recommender, monkeypatch, variable):
    for name in traces.VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def traced():
        return getattr(
            http.app(lambda: recommender, lambda: "7", ServeConfig()), "_is_instrumented_by_opentelemetry", False
        )

    assert not traced()
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert traced()


def test_metrics_and_documentation_leave_the_port_of_the_service_where_metrics_have_one_of_their_own(recommender):
    def found(address):
        paths = ("metrics", "docs", "openapi.json", "health")
        linked = '<a href="/docs">' in requests.get(address, timeout=9).text
        return [linked, *(requests.get(f"{address}/{path}", timeout=9).status_code for path in paths)]

    with service(recommender) as address:
        assert found(address) == [True, 200, 200, 200, 200]
    with service(recommender, metrics_port=9100) as address:
        assert found(address) == [False, 404, 404, 404, 200]
