"""Every model as an ONNX graph: the same items and scores as torch, whatever the batch and the lengths."""

import copy
import shutil

import pytest
from support import has_option, save

from seqrec.artifacts import GRAPH, GRAPH_CARD, ITEMS
from seqrec.config import RegisterConfig
from seqrec.models import REGISTRY
from seqrec.serving import http, onnx_graph
from seqrec.serving.approximate_search import ApproximateRecommender
from seqrec.serving.onnx_graph import GraphRecommender
from seqrec.serving.recommender import Recommender, Request
from seqrec.serving.rules import Attribute, Attributes
from seqrec.training.checkpoint import catalogue_files, load_checkpoint, save_model

pytest.importorskip("onnxscript")


# An export takes seconds. These are made of operators of other models, and each export compares its scores itself;
# tests/counts/test_everywhere.py exports a bert4rec.
LIKE_OTHERS = {"bert4rec", "esasrec", "s3rec", "ssept", "zesrec"}


@pytest.mark.parametrize("name", sorted(REGISTRY.keys() - LIKE_OTHERS))
def test_the_graph_answers_as_torch_does(prepared, tmp_path, name):
    # all layers are traced alike: STRec, which has at least two, proves it
    options = {"layers": 1} if has_option(name, "layers") and name != "strec" else {}
    options |= {"request_time": True} if name == "flash4rec" else {}
    assert_the_graph_answers_as_torch_does(save(name, prepared, tmp_path / "saved", options=options, median_gap=1000.0))


def test_the_graph_of_a_history_of_item_vectors_answers_as_torch_does(prepared, tmp_path):
    options = {"objective": "causal", "history_layers": 1}
    assert_the_graph_answers_as_torch_does(
        save("recformer", prepared, tmp_path / "saved", options=options, median_gap=1000.0)
    )


def test_the_graph_of_an_ensemble_answers_as_torch_does(prepared, tmp_path):
    saved = save("fpmc", prepared, tmp_path / "saved", options={"members": 2})

    assert len(load_checkpoint(saved).model.parts) == 2
    assert_the_graph_answers_as_torch_does(saved)


def assert_the_graph_answers_as_torch_does(saved):
    values = onnx_graph.export(saved=saved, output=saved, k=15)

    assert values == {"k": 15}
    torch_, graph = Recommender.load(saved), GraphRecommender.of(saved)
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


def test_a_graph_that_does_not_belong_to_the_files_beside_it_is_refused(prepared, exported, tmp_path):
    saved, graph = (shutil.copytree(exported / name, tmp_path / name) for name in ("saved", "graph"))
    assert (graph / "vocabulary.parquet").read_bytes() == (saved / "vocabulary.parquet").read_bytes()
    shutil.copytree(graph, saved, dirs_exist_ok=True)
    model = GraphRecommender.of(saved).model

    def refused():
        with pytest.raises(ValueError, match="export it again"):
            GraphRecommender.of(saved)

    content = (saved / GRAPH).read_bytes()
    (saved / GRAPH).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused()
    (saved / GRAPH).write_bytes(content)
    save_model(saved, model, {"filter_seen": True}, catalogue_files(prepared))  # without titles
    refused()
    model.items.weight.data += 1
    save_model(saved, model, {"filter_seen": True}, catalogue_files(prepared, prepared.parent / ITEMS))
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


def test_the_service_runs_the_graph_beside_the_weights(exported, tmp_path):
    saved = shutil.copytree(exported / "saved", tmp_path / "saved")
    assert type(http.loaded(saved, 0, RegisterConfig())) is Recommender
    shutil.copytree(exported / "graph", saved, dirs_exist_ok=True)

    assert isinstance(http.loaded(saved, 0, RegisterConfig()), GraphRecommender)
    assert isinstance(http.loaded(saved, 50, RegisterConfig()), ApproximateRecommender)
