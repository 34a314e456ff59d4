"""What a training costs is measured on a copy, and announced where it is long."""

from __future__ import annotations

import logging

import torch
from accelerate import Accelerator
from support import prepare_rows, run, synthetic_rows, weights

from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.training import cost
from seqrec.training.checkpoint import load_checkpoint


def test_measuring_changes_neither_the_model_nor_the_random_numbers(tmp_path):
    prepared = prepare_rows(tmp_path, synthetic_rows())
    run(prepared, tmp_path, epochs=1)
    model = load_checkpoint(tmp_path / "finetuned").model
    before, state = weights(tmp_path), torch.get_rng_state()

    config = FinetuneConfig(batch_size=16, warmup_steps=1)
    data, accelerator = sequences.load(prepared), Accelerator(cpu=True)
    found = cost.measure(model, data, stage="finetune", config=config, filter_seen=True, accelerator=accelerator)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert found.steps == 4  # 60 users
    assert found.epoch_s > found.step_s > 0
    assert found.memory > 1e6


def test_a_long_training_is_announced_after_its_first_steps_and_not_changed(tmp_path, monkeypatch, caplog):
    prepared = prepare_rows(tmp_path, synthetic_rows())
    caplog.set_level(logging.INFO)
    run(prepared, tmp_path / "quiet", epochs=2, batch_size=4)
    assert "about" not in caplog.text

    monkeypatch.setattr(cost, "LONG_S", 0.0)
    run(prepared, tmp_path / "loud", epochs=2, batch_size=4)

    assert "min of training (2 epochs)" in caplog.text
    for name, value in weights(tmp_path / "quiet").items():
        assert torch.equal(weights(tmp_path / "loud")[name], value)
