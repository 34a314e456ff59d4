"""Every model as an ONNX graph: the same items and scores as torch, whatever the batch and the lengths."""

import copy
import logging
import re
import shutil
import subprocess
import sys

import pytest
import requests
from support import FACTS, MODULES, ROOT, has_option, save

from seqrec.artifacts import GRAPH, GRAPH_CARD, ITEMS, VOCABULARY, read_json
from seqrec.config import RegisterConfig, ServeConfig
from seqrec.models import REGISTRY
from seqrec.serving import http, onnx_engine, onnx_graph
from seqrec.serving.approximate_search import ApproximateEngine
from seqrec.serving.onnx_engine import OnnxEngine
from seqrec.serving.recommender import Recommender, Request
from seqrec.serving.rules import Attribute, Attributes
from seqrec.serving.torch_engine import TorchEngine
from seqrec.training.checkpoint import catalogue_files, load_checkpoint, save_model

pytest.importorskip("onnxscript")


# An export takes seconds. These are made of operators of other models, and each export compares its scores itself;
# tests/counts/test_everywhere.py exports a bert4rec, tests/tracking/test_registry.py a sasrec, `exported` an mfbpr.
LIKE_OTHERS = {"bert4rec", "esasrec", "fdsa", "recguru", "s3rec", "sasrec", "ssept", "zesrec"}
OPTIONS = {
    "flash4rec": {"request_time": True, "attribute_values": 3, "experts": 2},
    "gru4rec": {"attribute_values": 3},
    "fpmc": {"members": 2, "length": 1},  # an ensemble, and a history of one length alone
    "strec": {"layers": 2},
}
EXPORTED = [
    *((name, OPTIONS.get(name, {})) for name in sorted(REGISTRY.keys() - LIKE_OTHERS - {"mfbpr"})),
    ("recformer", {"objective": "causal", "layers": 0}),  # a history of item vectors
    ("strec", {"sampling": "none", "attention": "longformer", "attention_size": 4}),  # as many chunks as in the example
]


@pytest.mark.parametrize(("name", "options"), EXPORTED)
def test_the_graph_answers_as_torch_does(prepared, tmp_path, name, options):
    # all layers are traced alike: STRec, which has at least two, proves it
    fewer = {"layers": 1} if has_option(name, "layers") else {}
    saved = save(name, prepared, tmp_path / "saved", options=fewer | options, median_gap=1000.0)
    values = onnx_graph.export(saved=saved, output=saved, k=15)

    assert values == {"k": 15}
    card = read_json(saved / GRAPH_CARD)  # also what somebody needs who runs the graph alone
    assert (card["filter_seen"], card["median_gap"]) == (True, 1000.0)
    torch_, graph = Recommender.load(saved), onnx_engine.load(saved)
    kinds = Attributes({"kind": Attribute([("even", "odd")[item % 2] for item in range(40)])})
    torch_.attributes = graph.attributes = kinds
    allowed = [f"i{item}" for item in range(20, 30)]
    batches = [
        [Request(history=["i1"], k=5, allow=allowed, diversity=0.5), Request(history=["i2"], filter={"kind": ["odd"]})],
        [Request(history=["i1"], k=3)],
        [Request(history=["i1"], k=12, quota={"kind": {"odd": 2}})],  # more than the graph's 15 best items
        [Request(history=["i1"], k=7, boost={"kind": {"odd": 3.0}}, quota={"kind": {"odd": 2}})],
        [Request(history=["i5", "i6", "i7"], user="u3", exclude=["i8"]), Request(history=["i9"], user="nobody")],
        [Request(history=[f"i{n % 40}" for n in range(size)], k=15, user=f"u{size}") for size in range(1, 30)],
        [Request(history=["i1", "i2", "i3", "i4"], times=[0, 1, 3, 631_152_000])],  # seconds, and twenty years
        [Request(history=["i1", "i2"], times=[0, 77_000]), Request(history=[]), Request(history=["unheard of"])],
    ]
    for batch in batches:
        for ours, theirs in zip(graph.answer(batch), torch_.answer(batch), strict=True):
            assert ours.scores == pytest.approx(theirs.scores, abs=1e-4, rel=1e-4)
            assert (ours.source, ours.unknown) == (theirs.source, theirs.unknown)
            if len(set(theirs.scores)) == len(theirs.scores):  # equal scores, of an unknown user say, have no order
                assert ours.items == theirs.items


@pytest.fixture(scope="module")
def exported(prepared, tmp_path_factory):
    """A model, and a folder of its own for its graph."""
    folder = tmp_path_factory.mktemp("exported")
    saved = save("mfbpr", prepared, folder / "saved")
    onnx_graph.export(saved=saved, output=folder / "graph")
    return folder


@pytest.fixture
def together(exported, tmp_path):
    """A copy of the model with its graph."""
    shutil.copytree(exported / "saved", tmp_path / "copy")
    return shutil.copytree(exported / "graph", tmp_path / "copy", dirs_exist_ok=True)


def test_a_graph_that_does_not_belong_to_the_files_beside_it_is_refused(prepared, exported, together):
    assert (exported / "graph" / VOCABULARY).read_bytes() == (exported / "saved" / VOCABULARY).read_bytes()
    model = load_checkpoint(together).model

    def refused():
        with pytest.raises(ValueError, match="export it again"):
            onnx_engine.load(together)

    content = (together / GRAPH).read_bytes()
    (together / GRAPH).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused()
    (together / GRAPH).write_bytes(content)
    save_model(together, model, FACTS, catalogue_files(prepared))  # without titles
    refused()
    model.items.weight.data += 1
    save_model(together, model, FACTS, catalogue_files(prepared, prepared.parent / ITEMS))
    refused()


def test_a_graph_with_other_scores_is_not_written(prepared, tmp_path, monkeypatch):
    saved, right = save("mfbpr", prepared, tmp_path / "saved"), onnx_graph.graph

    def wrong(model, k, term):
        twisted = copy.deepcopy(model)
        twisted.items.weight.data[3] += 1
        return right(twisted, k, term)

    monkeypatch.setattr(onnx_graph, "graph", wrong)
    with pytest.raises(ValueError, match="scores of the graph and of the weights differ"):
        onnx_graph.export(saved=saved, output=tmp_path / "graph")
    assert not (tmp_path / "graph" / GRAPH_CARD).exists()


def test_the_service_runs_the_graph_beside_the_weights_or_says_the_recall_of_its_search(exported, tmp_path, caplog):
    saved = shutil.copytree(exported / "saved", tmp_path / "saved")

    def engine(ann=0):
        return type(http.loaded(saved, RegisterConfig(), ServeConfig(ann=ann)).engine)

    assert engine() is TorchEngine
    shutil.copytree(exported / "graph", saved, dirs_exist_ok=True)
    assert engine() is OnnxEngine
    with caplog.at_level(logging.INFO):
        assert engine(ann=50) is ApproximateEngine
    assert "with 50 candidates, recall@10 against exact search is " in caplog.text


def test_the_service_answers_without_torch(together):
    command = [sys.executable, "-c", MODULES, "serve", "--saved", str(together), "--port", "0", "--drain-s", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        address = next(re.search(r"http://[^\s;]+", line)[0] for line in process.stderr if "serving at" in line)
        answer = requests.post(f"{address}/recommend", json={"history": ["i1"], "user": "u3"}, timeout=30).json()
        process.terminate()
        modules = process.stdout.read().split()

    assert answer["items"] == Recommender.load(together).recommend(["i1"], user="u3").items
    assert {"torch", "pandas", "mlflow"}.isdisjoint(modules)
    assert "onnxruntime" in modules


def test_the_weights_are_loaded_when_the_graph_cannot_answer_and_must_still_be_its_own(together, prepared):
    first, second = onnx_engine.load(together), onnx_engine.load(together)

    assert "weights" not in vars(first.engine)
    assert first.similar("i1").items == Recommender.load(together).similar("i1").items
    other = load_checkpoint(together).model
    other.items.weight.data += 1
    save_model(together, other, FACTS, catalogue_files(prepared, prepared.parent / ITEMS))
    assert first.similar("i1").items
    assert second.recommend(["i1"]).items == first.recommend(["i1"]).items
    with pytest.raises(RuntimeError, match="export it again; then start the service again"):
        second.similar("i1")
