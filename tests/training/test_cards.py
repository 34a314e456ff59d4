"""A model's folder is complete, and nothing in it that was altered, cut off or mixed up is loaded."""

from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import make_model, run, save

from seqrec.artifacts import read_json, sha256
from seqrec.config import EvaluateConfig, FinetuneConfig
from seqrec.serving.recommender import Recommender
from seqrec.stages.evaluate import evaluate
from seqrec.stages.finetune import finetune
from seqrec.training import cards
from seqrec.training.checkpoint import load_model, save_model

CARD, WEIGHTS, TOKENS, VOCABULARY = "config.json", "best.safetensors", "tokens.safetensors", "vocabulary.parquet"
GONE = "gone"  # a key that is left out


@pytest.fixture(scope="module")
def saved(prepared, tmp_path_factory):
    """Small models as training leaves them, by architecture."""
    root = tmp_path_factory.mktemp("saved")
    return {name: save(name, prepared, root / name) for name in ("sasrec", "gru4rec", "recformer", "flash4rec", "fdsa")}


@pytest.fixture
def copy(saved, tmp_path):
    """Return a copy of a saved model, to be altered."""

    def copied(architecture: str = "sasrec"):
        return shutil.copytree(saved[architecture], tmp_path / architecture)

    return copied


def rewrite(folder, *path, value):
    """Set or delete an entry of the card."""
    card = read_json(folder / CARD)
    place = card
    for key in path[:-1]:
        place = place[key]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    (folder / CARD).write_text(json.dumps(card))


@pytest.mark.parametrize("value", [GONE, None, [], "x", -1, 1e400, float("nan"), 10**30, True], ids=repr)
@pytest.mark.parametrize("key", [*cards.KINDS, "catalogue.num_items", "catalogue.length", "options.layers"])
def test_a_card_with_a_wrong_entry_is_one_clear_error(copy, key, value):
    allowed = {("filter_seen", True), ("stage", "x"), ("fingerprint", "x"), ("model", "x"), ("options.layers", True)}
    if (key, value) in [*allowed, ("options.layers", GONE)]:
        return  # nothing is wrong with it: two layers are the default
    folder = copy()
    rewrite(folder, *key.split("."), value=value)

    with pytest.raises(ValueError, match=CARD):
        Recommender.load(folder)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("sasrec", {"layers": 10_000_000}),
        ("sasrec", {"d_model": 2**40}),
        ("sasrec", {"d_model": 0}),
        ("sasrec", {"d_model": -16}),
        ("sasrec", {"heads": 0}),
        ("sasrec", {"heads": 3}),
        ("sasrec", {"length": 2**60}),
        ("sasrec", {"dropout": "much"}),
        ("sasrec", {"dropout": 7.0}),
        ("sasrec", {"objective": "none"}),
        ("sasrec", {"no_such": 1}),
        ("gru4rec", {"layers": 10_000_000}),
        ("flash4rec", {"layers": 10_000_000}),
        ("flash4rec", {"experts": 10_000_000}),
        ("flash4rec", {"d_value": 2**40}),
        ("recformer", {"layers": 10_000_000}),
        ("recformer", {"vocabulary": "x"}),
    ],
)
def test_options_that_the_weights_were_not_made_with_build_nothing(copy, architecture, options):
    folder = copy(architecture)
    for name, value in options.items():
        rewrite(folder, "options", name, value=value)
    before = torch.get_rng_state()

    with pytest.raises(ValueError, match=CARD + "|does not fit"):
        load_model(folder)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("architecture", ["fpmc", "caser", "no_such", "", "recformer"])
def test_weights_of_another_architecture_are_refused(copy, architecture):
    folder = copy()
    rewrite(folder, "architecture", value=architecture)

    with pytest.raises(ValueError, match=CARD + "|does not fit"):
        load_model(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": 1}', b" " * 2**21], ids=len
)
def test_a_card_that_is_none_is_refused(copy, content):
    folder = copy()
    (folder / CARD).write_bytes(content)

    with pytest.raises(ValueError, match=CARD):
        load_model(folder)


def resealed(folder, name, change):
    """Alter a file, and give the card its new hash, as somebody would who means it."""
    change(folder / name)
    card = read_json(folder / CARD)
    digest = sha256(folder / name)
    keys = {WEIGHTS: "weights_sha256", TOKENS: "tokens_sha256"}
    card |= {keys[name]: digest} if name in keys else {"files": card["files"] | {name: digest}}
    (folder / CARD).write_text(json.dumps(card))


def edited(**changes):
    """Return what replaces tensors of a file, or takes out those that become None."""

    def change(path):
        tensors = load_file(path) | changes
        save_file({name: value for name, value in tensors.items() if value is not None}, path)

    return change


def cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def huge(path):
    """Write a header that claims terabytes."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("architecture", "name", "change"),
    [
        ("sasrec", WEIGHTS, lambda path: cut(path, 0)),
        ("sasrec", WEIGHTS, lambda path: cut(path, 0.001)),
        ("sasrec", WEIGHTS, lambda path: cut(path, 0.5)),
        ("sasrec", WEIGHTS, lambda path: path.write_bytes(b"\xff" * 999)),
        ("sasrec", WEIGHTS, huge),
        ("sasrec", WEIGHTS, edited(extra=torch.zeros(3))),
        ("sasrec", WEIGHTS, edited(positions=None)),
        ("sasrec", WEIGHTS, edited(positions=torch.zeros(12, 17))),
        ("sasrec", WEIGHTS, edited(positions=torch.zeros(12, 16, dtype=torch.float64))),
        ("sasrec", WEIGHTS, edited(positions=torch.zeros(12, 16, dtype=torch.int64))),
        ("sasrec", VOCABULARY, lambda path: cut(path, 0.9)),
        ("sasrec", VOCABULARY, lambda path: pq.write_table(pq.read_table(path).slice(0, 20), path)),
        ("sasrec", VOCABULARY, lambda path: pq.write_table(pq.read_table(path).drop_columns("title"), path)),
        ("sasrec", "users.parquet", lambda path: pq.write_table(pq.read_table(path).slice(1), path)),
        ("recformer", TOKENS, lambda path: cut(path, 0.5)),
        ("recformer", TOKENS, edited(ids=None)),
        ("recformer", TOKENS, edited(ids=torch.full((80,), 7))),
        ("recformer", TOKENS, edited(offsets=torch.arange(42) * 1000)),
        ("recformer", TOKENS, edited(special=torch.tensor([0, 2, 3, 2**40]))),
        ("recformer", TOKENS, edited(pickle=torch.zeros(1))),
        ("fdsa", TOKENS, edited(values=torch.tensor([[-1, 13, 0]] * 41, dtype=torch.int32))),
        ("fdsa", TOKENS, edited(values=torch.zeros(41, dtype=torch.int32))),
        ("fdsa", TOKENS, edited(values=torch.full((41, 3), 2**30, dtype=torch.int32))),
    ],
)
def test_files_that_the_model_cannot_use_are_refused(copy, architecture, name, change):
    folder = copy(architecture)
    resealed(folder, name, change)

    with pytest.raises(ValueError, match=str(folder)):
        Recommender.load(folder)


@pytest.mark.parametrize("name", [WEIGHTS, VOCABULARY, "users.parquet"])
def test_a_file_that_is_another_or_gone_is_refused(copy, name):
    folder = copy()
    content = bytearray((folder / name).read_bytes())
    content[-5] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} differs from the file that config.json describes"):
        Recommender.load(folder)

    (folder / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=name):
        Recommender.load(folder)


def test_a_model_of_an_older_version_says_that_it_must_be_trained_again(copy):
    folder = copy()
    rewrite(folder, "files", value=GONE)

    with pytest.raises(ValueError, match=r"older version .* train the model again, and register it again"):
        Recommender.load(folder)


def test_a_shuffled_vocabulary_recommends_nothing(copy):
    folder = copy()
    table = pq.read_table(folder / VOCABULARY)
    pq.write_table(table.take(list(range(39, -1, -1))), folder / VOCABULARY)

    with pytest.raises(ValueError, match="refusing to load"):
        Recommender.load(folder)


def test_every_architecture_is_built_as_it_was_saved(architecture, tmp_path):
    model = make_model(architecture[0]).eval()
    save_model(tmp_path, model, {})

    loaded, _ = load_model(tmp_path)

    assert {name: value.shape for name, value in loaded.named_buffers()} == {
        name: value.shape for name, value in model.named_buffers()
    }
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def renamed(prepared, folder):
    """Return a copy of a prepared dataset in which two items have changed places."""
    shutil.copytree(prepared, folder)
    table = pq.read_table(folder / VOCABULARY)
    order = [1, 0, *range(2, len(table))]
    pq.write_table(table.set_column(1, table.schema.field(1), table["item_id"].take(order)), folder / VOCABULARY)
    return folder


def test_training_hands_titles_and_users_on_and_keeps_to_its_catalogue(prepared, tmp_path):
    other = renamed(prepared, tmp_path / "other")
    run(prepared, tmp_path, epochs=1)

    folders = [tmp_path / "initial", tmp_path / "finetuned"]
    assert all(set(load_model(folder)[1]["files"]) == {VOCABULARY, "users.parquet"} for folder in folders)
    shared = {"model": "sasrec", "checkpoint": tmp_path / "finetuned"}
    with pytest.raises(ValueError, match=r"vocabulary\.parquet: the item_ids differ"):
        evaluate(sequences=other, report=tmp_path, config=EvaluateConfig(bootstrap=100), **shared)
    with pytest.raises(ValueError, match=r"vocabulary\.parquet: the item_ids differ"):
        finetune(
            sequences=other,
            initial=tmp_path / "initial",
            state=tmp_path / "state",
            filter_seen=True,
            config=FinetuneConfig(),
            **shared,
        )


def test_titles_belong_to_the_model(saved):
    answer = Recommender.load(saved["sasrec"]).recommend(["i1"], 3)

    assert answer.titles == [f"Title of {item_id}" for item_id in answer.items]
