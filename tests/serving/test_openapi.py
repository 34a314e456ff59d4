"""Whatever a body holds, as the published schema has it or not, the service answers without a failure of its own."""

from unittest import mock

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from support import save, service

from seqrec.serving import http
from seqrec.serving.batcher import Served
from seqrec.serving.events import Event, Store
from seqrec.serving.recommender import Recommender

BOUNDED = settings(
    max_examples=15, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
ANSWERABLE = {"history": ["1", "0"], "times": None, "filter": {}, "boost": {}, "quota": {}, "items_text": {}}


def repaired(body):
    """Return a body with the histories of users whom the model knows, and without rules."""
    if "requests" in body:
        return {"requests": [{**one, **ANSWERABLE} for one in [*body["requests"], {}]]}
    return {**body, **ANSWERABLE}


@pytest.fixture(scope="module")
def api(prepared, tmp_path_factory):
    saved = Recommender.load(save("tisasrec", prepared, tmp_path_factory.mktemp("served")))
    drawn = ["", *map(chr, range(48, 48 + len(saved.item_ids) - 1))]  # ids that generated bodies hit
    recommender = Recommender(saved.engine, drawn, saved.counts, ["", "0"], filter_seen=True, name="tisasrec")
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('store')}/events.db")
    store.add([Event(event_id=user, user=user, item="1", kind="view", at=1.0) for user in ("", "0")])
    with (
        mock.patch.object(http, "WRITE_EVERY_S", 0),  # for which DELETE waits
        service(recommender, store=store, candidate=Served(recommender, "2")) as address,
    ):
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")


RECOMMEND = ("/recommend", "/recommend/batch")


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        *((path, "GET", GenerationMode.NEGATIVE) for path in ("/similar/{item}", "/popular", "/trending", "/items")),
        *((path, "POST", mode) for path in ("/events", "/recommend") for mode in GenerationMode),
        *((path, "POST", GenerationMode.POSITIVE) for path in ("/recommend/batch", "/explain")),
        ("/users/{user}", "GET", GenerationMode.POSITIVE),
        ("/users/{user}", "DELETE", GenerationMode.POSITIVE),
    ],
)
def test_no_request_makes_the_service_fail(api, path, method, mode):
    statuses, sources = set(), set()

    @BOUNDED
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def call(case):
        response = case.call()
        case.validate_response(response, checks=[not_a_server_error])
        statuses.add(response.status_code)
        if path in RECOMMEND and mode is GenerationMode.POSITIVE:
            case.body = repaired(case.body)  # most lack a history, or name attributes that no item has
            response = case.call()
            case.validate_response(response, checks=[not_a_server_error])
            if response.status_code == 200:
                content = response.json()
                sources.update(answer["source"] for answer in content.get("answers", [content]))

    call()
    assert 422 in statuses or mode is GenerationMode.POSITIVE
    if path in RECOMMEND and mode is GenerationMode.POSITIVE:
        assert "tisasrec" in sources  # the model was reached
