"""What only a GPU can show; `pytest -m gpu` runs it where there is one."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from support import make_batch, make_model, trained

from seqrec.config import CountsConfig, FinetuneConfig
from seqrec.counts import term
from seqrec.counts.case_ranks import CaseRanks
from seqrec.counts.search import Tables
from seqrec.data import sequences
from seqrec.evaluation import ranking
from seqrec.models.base import Objective
from seqrec.training import loop, losses
from seqrec.training.resume import ResumeState

pytestmark = [pytest.mark.gpu]
LOSSES = [
    {"loss": "sampled_ce", "negatives": 16},
    {"loss": "bce", "negatives": 1},
    {"loss": "gbce", "negatives": 16, "gbce_t": 0.75},
    {"loss": "bpr", "negatives": 4},
    {"exclude_past": True},
    {"contrast": 0.1},
    {"resident": False},
    {"windows": "all", "ties": "shuffle"},
]


def fit(model, data, out, **settings):
    """Train `model` on the GPU in every phase; return the records of fine-tuning."""
    accelerator = Accelerator()
    values = {"epochs": 3, "batch_size": 16, "warmup_steps": 2, "learning_rate": 5e-3}
    config = FinetuneConfig(**(values | settings))
    common = {"config": config, "filter_seen": True, "accelerator": accelerator}
    before = model.phases("pretrain")
    loop.fit(model, data, stage="pretrain", state=ResumeState(out, "a"), epochs=dict.fromkeys(before, 1), **common)
    return loop.fit(model, data, stage="finetune", state=ResumeState(out, "b"), **common)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("architecture", "objective"), trained(*get_args(Objective)))
def test_every_model_trains_and_scores_as_on_a_cpu(data, tmp_path, architecture, objective, precision):
    model = make_model(architecture, objective=objective, num_items=data.num_items, num_users=data.num_users)

    records = fit(model, data, tmp_path, precision=precision)

    assert math.isfinite(records[-1]["loss"])
    batch = model.asked(make_batch([[3, 7, 2, 9, 4], [5, 1, 8], [6]]))
    model.eval().cpu()
    expected = model(batch, last=True)
    model.cuda()
    found = model(type(batch)(*(values.cuda() for values in batch)), last=True)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("settings", LOSSES, ids=str)
def test_every_loss_and_way_to_read_the_data_trains(data, tmp_path, settings):
    model = make_model("sasrec", num_items=data.num_items)

    records = fit(model, data, tmp_path, **settings)

    assert records[-1]["loss"] < records[0]["loss"]


@pytest.mark.parametrize("floats", [400, 64_000_000])  # blocks of ten targets; one block
@pytest.mark.parametrize("past", [False, True])
def test_full_cross_entropy_is_that_of_a_cpu(monkeypatch, floats, past):
    monkeypatch.setattr(losses, "LOGITS_ON_GPU", floats)
    query, item, target = torch.randn(70, 8), torch.randn(41, 8), torch.randint(1, 41, (70,))
    seen = losses.PastItems(torch.randint(0, 41, (7, 5)), torch.arange(70) // 10, torch.arange(70) % 5)

    def values(device):
        given = [x.detach().to(device).requires_grad_() for x in (query, item)]
        items = losses.PastItems(*(x.to(device) for x in seen)) if past else None
        value = losses.cross_entropy(*given, target.to(device), past=items)
        value.mean().backward()
        return [x.cpu() for x in (value, *(x.grad for x in given))]

    for found, expected in zip(values("cuda"), values("cpu"), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_ranks_are_those_of_a_cpu(data):
    model = make_model("sasrec", num_items=data.num_items).eval()

    def ranks(device):
        moved, there = model.to(device), data.to(torch.device(device))
        cases = sequences.cases(there, "test")
        return ranking.rank(ranking.model_scorer(moved), there, cases, filter_seen=True, top_k=5)

    found, expected = ranks("cuda"), ranks("cpu")

    for name in ("rank", "rank_unfiltered"):
        same = getattr(found, name).cpu() == getattr(expected, name).cpu()
        assert same.float().mean() > 0.95  # scores that differ by rounding can change places


def test_counts_of_a_large_catalogue_are_those_of_a_cpu(data, monkeypatch):
    monkeypatch.setattr(term, "DENSE", 0)
    model = make_model("sasrec", num_items=data.num_items).eval()
    counts = Tables(data).built(CountsConfig())

    def values(device):
        there = data.to(torch.device(device))
        cases, scorer = sequences.cases(there, "valid"), ranking.model_scorer(model.to(device))
        return np.log(CaseRanks(scorer, there, cases, filter_seen=True)(counts)).mean()

    assert values("cuda") == pytest.approx(values("cpu"), abs=0.02)
