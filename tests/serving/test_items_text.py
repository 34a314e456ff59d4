"""Items that a text model never saw, recommended from the text that a request brings."""

import copy

import numpy as np
import pytest
import torch

from seqrec.data import item_tokens
from seqrec.models.base import Catalogue
from seqrec.models.recformer import Recformer, RecformerOptions
from seqrec.serving.approximate_search import ApproximateEngine
from seqrec.serving.onnx_engine import OnnxEngine
from seqrec.serving.recommender import Recommender, Request
from seqrec.serving.torch_engine import TorchEngine

WORDS = ["space", "war", "love", "song", "ghost", "city", "train", "river", "winter", "king"]
ITEMS = {
    f"i{n}": {"title": f"{WORDS[n % 10]} {WORDS[n // 10]}"} | ({"genre": WORDS[n % 3]} if n % 4 else {})
    for n in range(24)
}
NEW = {name: dict(reversed(ITEMS[name].items())) for name in ("i21", "i23")}  # in another order than in training


@pytest.fixture(scope="module")
def recommenders():
    """One that has read every item, and one with the same weights that has not read those of `NEW`."""
    torch.manual_seed(3)
    tokenizer = item_tokens.train_tokenizer([item_tokens.as_texts(list(ITEMS.values()))], 200)
    made, weights = [], None
    for names in ([*ITEMS.keys() - NEW.keys(), *NEW], ITEMS.keys() - NEW.keys()):
        ids = sorted(names, key=lambda name: (name in NEW, name))
        texts = item_tokens.as_texts([ITEMS[name] for name in ids], ["title", "genre"])
        tokens = item_tokens.tokenise(texts, tokenizer, 32)
        options = RecformerOptions(d_model=16, d_inner=32, length=8, max_tokens=64, attributes=("title", "genre"))
        model = Recformer(options, Catalogue(len(ids), 0, 8, tokens))
        state = {name: value for name, value in model.state_dict().items() if name != "vectors"}
        weights = weights or {name: value + 0.3 * torch.randn_like(value) for name, value in state.items()}
        model.load_state_dict(weights, strict=False)
        model.eval().refresh()
        counts = np.arange(len(ids) + 1)
        told = {"filter_seen": True, "name": "recformer", "tokenizer": tokenizer.to_str()}
        made.append(Recommender(TorchEngine(model), ids, counts, [], **told))
    return made


@pytest.mark.parametrize("history", [["i1", "i2", "i3"], ["i1", "i21"], ["i23"]])
def test_a_described_item_is_recommended_and_read_as_if_it_had_always_been_there(recommenders, history):
    whole, lacking = recommenders

    answer = lacking.recommend(history, 30, items_text=NEW)

    expected = whole.recommend(history, 30)
    assert answer.items == expected.items
    assert answer.scores == pytest.approx(expected.scores, abs=1e-4)
    assert NEW.keys() - set(history) <= set(answer.items)
    assert answer.unknown == 0


def test_what_each_event_adds_is_told_of_described_items(recommenders):
    whole, lacking = recommenders
    history = ["i1", "i21"]

    for item_id in ("i23", "i2"):
        drops = lacking.explain(Request(history=history, items_text=NEW), item_id)
        assert drops == pytest.approx(whole.explain(Request(history=history), item_id), abs=1e-4)
        assert all(drops)


def test_attributes_that_the_model_was_not_trained_on_are_not_read(recommenders):
    lacking, more = recommenders[1], {item_id: {"year": "1999", **text} for item_id, text in NEW.items()}
    ours, theirs = (lacking.recommend(["i1", "i21"], 30, items_text=given) for given in (more, NEW))

    assert (ours.items, ours.scores) == (theirs.items, theirs.scores)
    with pytest.raises(ValueError, match="'new' has none of the model's attributes: title, genre"):
        lacking.recommend(["i1"], items_text={**NEW, "new": {"year": "1999"}})


def test_a_described_item_is_found_beside_an_approximate_search_and_a_graph(recommenders):
    whole, lacking = recommenders
    searched, run = copy.copy(lacking), copy.copy(lacking)
    searched.engine = ApproximateEngine(lacking.engine.model, None, 64)
    run.engine = OnnxEngine.__new__(OnnxEngine)  # without a graph, which could not answer
    vars(run.engine).update(reads=lacking.engine.reads, weights=lacking.engine)

    for recommender in (searched, run):
        assert recommender.recommend(["i1", "i21"], 3, items_text=NEW).items == whole.recommend(["i1", "i21"], 3).items
    assert searched.recommend(["i1", "i2"], 3).items == lacking.recommend(["i1", "i2"], 3).items


def test_nobody_else_gets_a_described_item_and_nothing_of_it_stays(recommenders):
    lacking = recommenders[1]
    plain = Request(history=["i1", "i21"], k=30)

    answers = lacking.answer([plain, Request(history=["i2"], k=30, items_text=NEW), plain])

    expected = lacking.recommend(["i1"], 30)
    for answer in (answers[0], answers[2], lacking.answer([plain])[0]):
        assert (answer.items, answer.unknown) == (expected.items, 1)
        assert answer.scores == pytest.approx(expected.scores, abs=1e-4)
    assert len(lacking.engine.model.vectors) == len(ITEMS) - len(NEW) + 1


def test_without_a_known_item_a_described_one_is_the_least_popular(recommenders):
    answer = recommenders[1].recommend([], 30, items_text=NEW)

    assert answer.source == "popularity"
    assert set(answer.items[-2:]) == NEW.keys()


def test_what_cannot_be_read_is_refused_with_the_reason(recommenders, recommender):
    lacking = recommenders[1]
    with pytest.raises(ValueError, match="already knows the item 'i1'"):
        lacking.recommend(["i2"], items_text={"i1": {"title": "once more"}})
    with pytest.raises(ValueError, match="items_text: 'new' has no text"):
        lacking.recommend(["i2"], items_text={"new": {"title": " "}})
    with pytest.raises(ValueError, match="sasrec cannot read new text"):
        recommender.recommend(["i1"], items_text=NEW)
