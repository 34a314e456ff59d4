"""A checkpoint is complete, and no file of it that was altered, cut off or mixed up is loaded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import FACTS, exit_of, make_model, run, run_finetune, save

from seqrec.artifacts import read_json, sha256
from seqrec.config import CountsConfig, EvaluateConfig
from seqrec.stages.evaluate import evaluate
from seqrec.training.checkpoint import catalogue_files, load_checkpoint, save_model
from seqrec.training.saved import read

CARD, WEIGHTS, TOKENS, VOCABULARY = "config.json", "best.safetensors", "tokens.safetensors", "vocabulary.parquet"


@pytest.fixture(scope="module")
def saved(prepared, tmp_path_factory):
    """Small models as training leaves them, by architecture."""
    root = tmp_path_factory.mktemp("saved")
    return {name: save(name, prepared, root / name, CountsConfig()) for name in ("sasrec", "recformer")}


@pytest.fixture
def copy(saved, tmp_path):
    """Return a copy of a saved model, to be altered."""

    def copied(architecture: str = "sasrec"):
        return shutil.copytree(saved[architecture], tmp_path / architecture)

    return copied


def rewrite(folder, **entries):
    """Change entries of the card; None deletes one."""
    card = read_json(folder / CARD) | entries
    (folder / CARD).write_text(json.dumps({name: value for name, value in card.items() if value is not None}))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"options": None}, "config.json: options"),
        ({"options": {"d_model": 0}}, "config.json: .*d_model"),
        ({"options": {"layers": 3}}, "best.safetensors does not fit sasrec in this version"),
        ({"architecture": "no_such"}, "config.json: .*'no_such' is not one of"),
        ({"catalogue": {"num_items": 40, "num_users": 60}}, "config.json: catalogue.length"),
        ({"catalogue": {"num_items": 0, "num_users": 60, "length": 12}}, "config.json: catalogue: num_items"),
        ({"seconds": float("nan")}, "config.json: seconds"),
        ({"weights_sha256": None}, "config.json: weights_sha256"),
        ({"files": None}, "older version.*train the model again, and register it again"),
        ({"files": {"../users.parquet": "0" * 64}}, "config.json was written by an older version"),
    ],
)
def test_a_card_that_does_not_describe_the_weights_is_one_clear_error(copy, entries, message):
    folder = copy()
    rewrite(folder, **entries)

    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000], ids=len)
def test_a_card_that_is_none_is_refused(copy, content):
    folder = copy()
    (folder / CARD).write_bytes(content)

    with pytest.raises(ValueError, match=CARD):
        load_checkpoint(folder)


@pytest.mark.parametrize("change", [{"extra": torch.zeros(3)}, {"positions": None}, {"positions": torch.zeros(12, 17)}])
def test_other_tensors_with_their_own_digest_are_refused(copy, change):
    folder = copy()
    tensors = load_file(folder / WEIGHTS) | change
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / WEIGHTS)
    rewrite(folder, weights_sha256=sha256(folder / WEIGHTS))

    with pytest.raises(ValueError, match="does not fit sasrec in this version"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", [WEIGHTS, TOKENS, VOCABULARY, "users.parquet", "counts.safetensors"])
def test_a_file_that_is_another_or_cut_or_gone_is_refused(copy, name):
    folder = copy("recformer")
    content = bytearray((folder / name).read_bytes())
    content[-5] ^= 1
    for wrong in (content, content[: len(content) // 2]):
        (folder / name).write_bytes(wrong)
        with pytest.raises(ValueError, match=f"{name} differs from the file that config.json describes"):
            load_checkpoint(folder)

    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        load_checkpoint(folder)


def test_every_architecture_is_built_as_it_was_saved(architecture, prepared, tmp_path):
    model = make_model(architecture[0]).eval()
    save_model(tmp_path, model, FACTS, catalogue_files(prepared))
    before = torch.get_rng_state()

    loaded = load_checkpoint(tmp_path).model

    assert torch.equal(torch.get_rng_state(), before)
    assert {name: value.shape for name, value in loaded.named_buffers()} == {
        name: value.shape for name, value in model.named_buffers()
    }
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def renamed(prepared, folder):
    """Write a copy of a prepared dataset in which two items have changed places."""
    shutil.copytree(prepared, folder)
    table = pq.read_table(folder / VOCABULARY)
    order = [1, 0, *range(2, len(table))]
    pq.write_table(table.set_column(1, table.schema.field(1), table["item_id"].take(order)), folder / VOCABULARY)


def test_training_hands_titles_and_users_on_and_keeps_to_its_catalogue(prepared, tmp_path):
    renamed(prepared, tmp_path / "other" / "sequences")
    run(prepared, tmp_path, epochs=1)

    folders = [tmp_path / "initial", tmp_path / "finetuned"]
    assert all(set(load_checkpoint(folder).files) == {VOCABULARY, "users.parquet"} for folder in folders)
    other = {"sequences": tmp_path / "other" / "sequences", "report": tmp_path}
    with pytest.raises(ValueError, match=r"vocabulary\.parquet: the item_ids differ"):
        evaluate(model="sasrec", checkpoint=folders[1], config=EvaluateConfig(bootstrap=100), **other)
    with pytest.raises(ValueError, match=r"vocabulary\.parquet: the item_ids differ"):
        run_finetune("sasrec", tmp_path / "other", tmp_path)


THREADS = Path("/proc/self/task")


def read_tables(folder):
    """Read the tables; the exit status is the number of threads that this has started."""
    before = len([*THREADS.iterdir()])
    model = read(folder)
    assert model.vocabulary
    assert model.users
    sys.exit(max(0, len([*THREADS.iterdir()]) - before))  # one of the fork may have ended


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_the_tables_are_read_without_threads(saved):
    assert exit_of(read_tables, saved["sasrec"]) == 0
