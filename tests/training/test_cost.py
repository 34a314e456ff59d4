"""What a training costs is measured on a copy, and announced where it is long."""

from __future__ import annotations

import logging
import platform
import re
import resource
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support import run, weights
from torch.nn import functional as F

from seqrec.config import FinetuneConfig
from seqrec.training import auto_settings, cost, train, utilisation
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.losses import cross_entropy
from seqrec.training.utilisation import Utilisation


def test_measuring_changes_neither_the_model_nor_the_random_numbers(prepared, data, tmp_path):
    run(prepared, tmp_path, epochs=1)
    model = load_checkpoint(tmp_path / "finetuned").model
    before, state = weights(tmp_path), torch.get_rng_state()

    settings = {"stage": "finetune", "config": FinetuneConfig(batch_size=16, warmup_steps=1), "filter_seen": True}
    found = cost.measure(model, data, **settings, accelerator=Accelerator(cpu=True))

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert found.steps == 4  # 60 users
    assert found.epoch_s > found.step_s > 0
    assert found.memory > 1e6


@pytest.mark.parametrize("model", ["flash4rec", "rec_denoiser"])
def test_a_long_training_is_announced_after_its_first_steps_and_not_changed(
    prepared, tmp_path, monkeypatch, caplog, model
):
    caplog.set_level(logging.INFO)
    settings = {"options": {"d_model": 16, "length": 12, "layers": 1}, "epochs": 1, "batch_size": 4}
    run(prepared, tmp_path / "quiet", model, **settings)
    assert not any(words in caplog.text for words in ("min of training", "of the peak"))

    monkeypatch.setattr(cost, "LONG_S", 0.0)
    monkeypatch.setattr(utilisation, "PEAK_S", 0.0)
    run(prepared, tmp_path / "loud", model, **settings)

    assert "min of training (1 epochs)" in caplog.text
    assert re.search(r"targets/s, \d+% of the peak .* a target takes 0\.\d\d MFLOP.* matrix products \d+%", caplog.text)
    quiet, loud = (weights(tmp_path / name) for name in ("quiet", "loud"))
    assert all(torch.equal(loud[name], value) for name, value in quiet.items())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")
def test_freed_memory_is_kept_for_the_next_step_until_it_is_returned():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    cost.keep_freed_memory()
    before = resident()
    blocks = [torch.ones(1 << 18) for _ in range(200)]  # of a megabyte
    del blocks
    assert resident() - before > 100e6

    cost.return_freed_memory()

    assert resident() - before < 50e6


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in bf16")
@pytest.mark.parametrize(("precision", "fast"), [("bf16", False), ("bf16", True), ("auto", False)])
def test_precision_that_this_cpu_emulates_is_a_warning(prepared, tmp_path, monkeypatch, caplog, precision, fast):
    for module in (auto_settings, train):
        monkeypatch.setattr(module, "has_fast_bf16", lambda: fast)
    run(prepared, tmp_path, epochs=1, precision=precision)
    assert ("bf16 is emulated on this CPU" in caplog.text) == (precision == "bf16" and not fast)


@pytest.mark.parametrize("filter_seen", [False, True])
def test_training_without_past_items_that_are_ranked_is_a_warning(prepared, tmp_path, caplog, filter_seen):
    run(prepared, tmp_path, epochs=1, loss="ce", exclude_past=True, filter_seen=filter_seen)
    assert ("exclude_past: true trains without past items" in caplog.text) != filter_seen


def test_the_arithmetic_of_a_step_is_that_of_its_formulas():
    query, item = torch.randn(6, 8, requires_grad=True), torch.randn(21, 8, requires_grad=True)
    sequence, weight = torch.randn(2, 1, 5, 4, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    sizes = torch.tensor([1, 4, 6], dtype=torch.int32)
    meter = Utilisation(torch.device("cpu"), "fp32")
    meter.wanted = True

    with meter.around(cost.FIRST_STEPS, targets=6):
        loss = cross_entropy(query, item, torch.randint(1, 21, (6,))).sum()
        loss = loss + F.scaled_dot_product_attention(sequence, sequence, sequence).sum()
        (loss + F.grouped_mm(query, weight, offs=sizes).square().sum()).backward()

    scores, attention, experts = 2 * 6 * 20 * 8, 2 * 2 * 5 * 5 * 4, 2 * 6 * 8 * 16  # of one product
    # backward: two products for each of the forward pass, and attention computes its weights again
    assert meter.flops == (3 * scores + 2 * attention + 5 * attention + 3 * experts) / 6
