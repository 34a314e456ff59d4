"""The training loop: what it learns, what resuming gives, when it stops, and what its seed decides."""

import contextlib
import functools
import logging
import math
import re
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support import exit_of, interrupted, losses_of, make_model, prepare_rows, run, synthetic_rows, weights

from seqrec.config import ModelConfig, PretrainConfig, from_dict
from seqrec.data import sequences
from seqrec.evaluation.metrics import SELECTION
from seqrec.stages.pretrain import pretrain
from seqrec.training.checkpoint import load_checkpoint, save_model
from seqrec.training.progress import EpochMeter
from seqrec.training.resume import ResumeState
from seqrec.training.validation import validate


class Reached(Exception):  # noqa: N818
    """Validation is good enough: the training may end."""


def best_of(target, prepared, out, *arguments, **settings) -> float:
    """Return the best validation metric of a training, which ends as soon as it is above `target`."""
    metrics = [0.0]

    def log(record, _):
        metrics.append(record[SELECTION])
        if record[SELECTION] > target:
            raise Reached

    with contextlib.suppress(Reached):
        run(prepared, out, *arguments, log=log, **settings)
    return max(metrics)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("sampled_ce", {"sampler": "popularity"}),
        ("sampled_ce", {"sampler": "in_batch", "negatives": 16}),
        ("sampled_ce", {"sparse_tables": True, "negatives": 16}),
        *((loss, {}) for loss in ("bce", "gbce", "bpr")),
        ("ce", {"prefixes_per_user": 3, "options": {"objective": "last"}}),  # every position: test_golden.py
    ],
)
def test_every_loss_and_way_to_sample_learns_the_pattern(prepared, tmp_path, loss, settings):
    settings = {"loss": loss, "negatives": 8, "learning_rate": 1e-2} | settings

    assert best_of(0.35, prepared, tmp_path, epochs=25, **settings) > 0.35  # chance: 0.11


def test_masked_items_learn_the_pattern(prepared, tmp_path):
    # the head learns that an item is like itself on some machines and seeds, on others it does not
    options = {"objective": "cloze", "length": 6, "layers": 1, "prediction_head": False}
    settings = {"batch_size": 8, "mask_last_share": 0.7, "windows": "all", "patience": 20, "seed": 2}

    assert best_of(0.3, prepared, tmp_path, "flash4rec", options, epochs=20, learning_rate=1e-2, **settings) > 0.3


RESUMED = {
    "flash4rec": ("flash4rec", {}),
    "sparse": ("sasrec", {"loss": "sampled_ce", "sparse_tables": True}),
    "bf16": ("sasrec", {"precision": "bf16"}),
}


def run_resumed(prepared, out, case: str, save_steps: int = 1) -> None:
    """Train a case of `RESUMED` for eight steps."""
    model, config = RESUMED[case]
    run(prepared, out, model, epochs=2, save_steps=save_steps, **config)


@pytest.fixture(scope="module")
def uninterrupted(prepared, tmp_path_factory):
    """Return a function that trains a case of `RESUMED` once; its folder."""

    @functools.cache
    def train(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        run_resumed(prepared, folder, case, save_steps=500)
        return folder

    return train


@pytest.mark.parametrize(
    ("case", "step"),  # in the first epoch, at its end, in the second
    [*(("flash4rec", step) for step in (2, 4, 7)), ("sparse", 7), ("bf16", 4)],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(prepared, uninterrupted, tmp_path, caplog, case, step):
    caplog.set_level(logging.INFO)
    expected = uninterrupted(case)
    with interrupted(step):
        run_resumed(prepared, tmp_path, case)
    assert list((tmp_path / "state").glob(f"*/step-{step}"))

    run_resumed(prepared, tmp_path, case)

    assert re.search(r"resuming \S+ finetune", caplog.text)
    whole, parts = weights(expected), weights(tmp_path)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert losses_of(expected) == losses_of(tmp_path)
    assert list((tmp_path / "state").glob("*/step-*")) == []


def test_another_training_does_not_resume_from_this_one(prepared, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with interrupted(4):
        run(prepared, tmp_path, epochs=2)

    for changed in ({"options": {"dropout": 0.5}}, {"learning_rate": 1e-4}):
        run(prepared, tmp_path, epochs=2, **changed)
        assert "resuming" not in caplog.text
    run(prepared, tmp_path, epochs=2)
    assert "resuming sasrec finetune" in caplog.text


@pytest.mark.parametrize(("batch_size", "warned"), [(64, True), (16, False)])
def test_few_steps_per_epoch_are_worth_a_warning_unless_batches_are_small_already(
    prepared, tmp_path, caplog, monkeypatch, batch_size, warned
):
    monkeypatch.setattr("seqrec.stages.finetune._said", set())  # by other tests of this process

    run(prepared, tmp_path, epochs=1, batch_size=batch_size)

    assert ("steps per epoch: lower finetune.batch_size" in caplog.text) is warned


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The same log in one file, and in shards."""
    root = tmp_path_factory.mktemp("logs")
    return [prepare_rows(root / str(size), synthetic_rows(users=30), shard_events=size) for size in (10**6, 150)]


@pytest.mark.parametrize(("model", "objective"), [("sasrec", "causal"), ("sasrec", "last"), ("bert4rec", "cloze")])
def test_training_from_mapped_shards_is_training_from_memory_bit_for_bit(logs, tmp_path, model, objective):
    options = {"d_model": 8, "length": 12, "objective": objective}
    settings = {"epochs": 1, "prefixes_per_user": 2, "windows": "all", "options": options}

    run(logs[0], tmp_path / "one", model, **settings)
    run(logs[1], tmp_path / "two", model, resident=False, **settings)

    assert losses_of(tmp_path / "one") == losses_of(tmp_path / "two")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_early_stopping_keeps_the_best_epoch(prepared, tmp_path):
    values = run(prepared, tmp_path, epochs=60, patience=2, learning_rate=2e-2)

    history = losses_of(tmp_path)
    metrics = [record["valid/ndcg@10"] for record in history]
    assert len(history) < 60
    assert len(history) - 1 - metrics.index(max(metrics)) == 2
    checkpoint = load_checkpoint(tmp_path / "finetuned")
    again = validate(checkpoint.model, sequences.load(prepared), filter_seen=True)
    assert again["valid/ndcg@10"] == pytest.approx(max(metrics)) == pytest.approx(values["valid/ndcg@10"])
    assert checkpoint.card["filter_seen"] is True


def fill(folder: Path) -> None:
    """Save a state, and another one where there is room for half of it; the exit status is 10 and what is loaded."""
    state = ResumeState(folder, "f")
    state.save(1, {"x": torch.ones(10), "n": 1})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        state.save(2, {"x": torch.ones(10_000), "n": 2})
    except OSError:
        sys.exit(10 + state.load()["n"])


def test_a_full_disk_is_an_error_that_leaves_the_last_state(tmp_path):
    assert exit_of(fill, tmp_path) == 10 + 1


def test_a_log_without_validation_cases_is_refused(tmp_path):
    rows = [(f"u{user}", f"i{(user + n) % 12}", 100 * user + n) for user in range(20) for n in range(8)]

    with pytest.raises(ValueError, match="no validation cases"):
        run(prepare_rows(tmp_path, rows, protocol="RATIO-full"), tmp_path)


@pytest.mark.parametrize(
    ("clip_norm", "message"),
    [(1.0, "the loss or its gradient is not finite at step 4"), (0.0, "the weights .* are not")],
)
def test_nothing_is_kept_of_an_epoch_that_ends_badly(prepared, tmp_path, monkeypatch, clip_norm, message):
    """The loss of the last of four steps is finite, its gradient is not; without clipping, the weights show it."""
    backward, calls = Accelerator.backward, []

    def diverging(self, loss):
        calls.append(1)
        backward(self, loss * (math.inf if len(calls) == 4 else 1))

    monkeypatch.setattr(Accelerator, "backward", diverging)

    with pytest.raises(FloatingPointError, match=f"{message}.*finetune.learning_rate"):
        run(prepared, tmp_path, clip_norm=clip_norm, save_steps=100)

    assert not (tmp_path / "finetuned").exists()
    assert list((tmp_path / "state").glob("*/step-*")) == []


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    model = make_model("sasrec")
    with torch.no_grad():
        model.positions[2, 0] = float("nan")

    with pytest.raises(ValueError, match="NaN or infinity in positions"):
        save_model(tmp_path / "bad", model, {}, {})


ONE_BATCH = {"batch_size": 1000, "epochs": 1}
SAMPLED = {"loss": "sampled_ce", "negatives": 4}


def test_a_runs_seed_is_that_of_both_stages_unless_they_name_one():
    models = {"sasrec": {}, "other": {"architecture": "sasrec", "pretrain": {"seed": 8}, "finetune": {"seed": 9}}}
    params = from_dict({"seed": 7, "dataset": "log", "models": models})

    assert [params.section(stage, model="sasrec").seed for stage in ("pretrain", "finetune")] == [7, 7]
    assert [params.section(stage, model="other").seed for stage in ("pretrain", "finetune")] == [8, 9]
    assert [params.section(stage).seed for stage in ("prepare", "evaluate", "register")] == [42, 42, 42]
    assert params.as_dict()["seed"] == 7


def test_seeds_differ_in_initialisation(prepared, tmp_path):
    shared = {"model": "sasrec", "sequences": prepared, "data": tmp_path, "state": tmp_path, "filter_seen": True}
    for seed in (1, 2):
        config, architecture = PretrainConfig(seed=seed), ModelConfig(architecture="sasrec", options={})
        pretrain(**shared, initial=tmp_path / str(seed), architecture=architecture, config=config)

    first, second = (load_checkpoint(tmp_path / seed).model.items.weight for seed in "12")
    assert not torch.allclose(first, second)


@pytest.mark.parametrize(
    ("part", "options", "config"),
    [
        ("order", {"dropout": 0.0}, {"epochs": 1}),
        ("dropout", {"dropout": 0.5}, ONE_BATCH),
        ("negatives", {"dropout": 0.0}, ONE_BATCH | SAMPLED),
        ("nothing", {"dropout": 0.0}, ONE_BATCH),
    ],
)
def test_seeds_differ_in_each_random_part_of_training(prepared, tmp_path, part, options, config):
    """From the same weights, and with all other parts taken away."""
    losses = []
    for seed in (1, 2):
        run(prepared, tmp_path / str(seed), options=options, seed=seed, **config)
        losses.append(losses_of(tmp_path / str(seed))[0]["loss"])

    assert (abs(losses[0] - losses[1]) > 1e-5) == (part != "nothing")


def test_the_seconds_of_a_complete_epoch_are_not_those_of_the_next():
    meter = EpochMeter(torch.device("cpu"))
    meter.add(torch.ones(()), {}, 1)
    assert meter.state_dict()["before"] > 0
    meter.clear()
    assert meter.state_dict()["before"] == 0
