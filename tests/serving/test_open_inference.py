"""The open inference protocol over HTTP, as KServe and its clients use it."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import PackageNotFoundError
from unittest import mock

import pytest
import requests

import seqrec
from seqrec.config import ServeConfig
from seqrec.serving import http
from seqrec.serving.open_inference import INPUTS, OUTPUTS

MODEL = "/v2/models/seqrec"


def tensor(data, *shape, name="history"):
    return {"name": name, "datatype": "BYTES", "shape": shape, "data": data}


def infer(address, *inputs, **more):
    return requests.post(f"{address}{MODEL}/infer", json={"inputs": inputs, **more}, timeout=10)


def test_the_service_needs_no_installed_package_of_its_own(recommender, monkeypatch):
    """As in the image, where PYTHONPATH finds it."""
    monkeypatch.setattr(importlib.metadata, "distribution", mock.Mock(side_effect=PackageNotFoundError))

    assert http.app(lambda: recommender, lambda: "7", ServeConfig()).version == seqrec.__version__


def test_the_service_and_the_model_say_what_they_are(address):
    def get(path):
        return requests.get(address + path, timeout=10).json()

    assert get("/v2") == {"name": "seqrec", "version": seqrec.__version__, "extensions": []}
    assert get("/v2/health/live") == {"live": True}
    assert get("/v2/health/ready") == {"ready": True}
    assert get(f"{MODEL}/ready") == {"name": "seqrec", "ready": True}
    found = get(MODEL)
    assert (found["versions"], found["inputs"], found["outputs"]) == (["7"], INPUTS, OUTPUTS)
    for path in ("other", "other/ready"):
        assert requests.get(f"{address}/v2/models/{path}", timeout=10).status_code == 404


@pytest.mark.parametrize("data", [["i1", "i2", "i3", ""], [["i1", "i2"], ["i3", ""]]], ids=["flat", "nested"])
def test_the_tensors_hold_the_recommenders_answers(address, recommender, data):
    user = tensor(["u1", ""], 2, name="user")
    answer = infer(address, tensor(data, 2, 2), user, id="mine", parameters={"k": 3}).json()

    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("seqrec", "7", "mine")
    outputs = {one["name"]: one for one in answer["outputs"]}
    assert {name: (one["datatype"], len(one["shape"])) for name, one in outputs.items()} == {
        one["name"]: (one["datatype"], len(one["shape"])) for one in OUTPUTS
    }
    expected = [recommender.recommend(["i1", "i2"], 3, user="u1"), recommender.recommend(["i3"], 3)]
    assert outputs["items"]["shape"] == [2, 3]
    assert outputs["items"]["data"] == [*expected[0].items, *expected[1].items]
    assert outputs["scores"]["data"] == pytest.approx([*expected[0].scores, *expected[1].scores], abs=1e-5)


def test_a_shorter_list_is_filled_up(address, recommender):
    seen = recommender.item_ids[:5]
    answer = infer(address, tensor([*seen, "i1", "", "", "", ""], 2, 5), parameters={"k": 1000}).json()

    items, scores, _ = (one["data"] for one in answer["outputs"])
    known = len(recommender.item_ids)
    assert answer["outputs"][0]["shape"] == [2, known - 1]
    assert (items[: known - 1].count(""), items[known - 1 :].count("")) == (4, 0)
    assert scores[known - 5 : known - 1] == [0.0] * 4


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "the tensor history is missing"),
        ([tensor(["i1"], 1, 2)], "has 1 elements, which do not fit its shape [1, 2]"),
        ([tensor([["i1"], "i2"], 2, 1)], "valid list"),
        ([tensor([["i1", "i2", "i3"], ["i4"]], 2, 2)], "rows that do not fit its shape [2, 2]"),
        ([tensor(["i1"], 1, 1), tensor(["u1", "u2"], 1, 2, name="user")], "several users in a row"),
        ([tensor(["i1"], 1, 1), tensor(["i1"], 1, 1, name="times")], "'times' is unknown"),
        ([tensor(["i1"], 1, 1), tensor([], 2, 0, name="user")], "1 histories, but 2 users"),
        ([tensor(["i1"] * 1001, 1001, 1)], "at most 1000 histories"),
        ([tensor(["i" * 1001], 1, 1)], "at most 1000 characters"),
        ([tensor(["i1"], 1, 1) | {"datatype": "FP32"}], "BYTES"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(address, inputs, message):
    answer = infer(address, *inputs)

    assert answer.status_code == 422
    assert message in answer.text


def test_an_id_that_is_no_text_is_refused(address):
    assert infer(address, tensor(["i1"], 1, 1), id="\ud800").status_code == 422
