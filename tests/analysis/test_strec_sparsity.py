"""A trained STRec served with other numbers of rows: what is measured, and that nothing of it stays."""

from __future__ import annotations

import pytest
import torch
from support import make_model

from seqrec.analysis import strec_sparsity
from seqrec.config import EvaluateConfig
from seqrec.evaluation import results
from seqrec.evaluation.ranking import model_scorer
from seqrec.models.base import Batch

LENGTH = 10


@pytest.fixture
def model(data):
    torch.manual_seed(0)
    size = {"num_items": data.num_items, "num_users": data.num_users}
    return make_model("strec", **size, length=LENGTH, layers=3, sparsity=0.6).eval()


@pytest.mark.parametrize("filter_seen", [True, False])
def test_the_point_of_the_training_is_what_the_evaluation_reports(model, data, tmp_path, filter_seen):
    config = EvaluateConfig(top_k=10, bootstrap=100)
    with torch.no_grad():
        reported = results.report(model_scorer(model), data, tmp_path, config, {}, filter_seen=filter_seen)
    (own,) = [point for point in strec_sparsity.sweep(model, data, filter_seen=filter_seen, seed=0) if point.trained]

    assert own.ndcg == pytest.approx(reported["valid/ndcg@10"], abs=1e-12)
    assert own.sparsity == pytest.approx(1 - (4 + 4 + 1) / 3 / LENGTH)


def test_every_point_computes_its_rows_and_the_model_stays_as_it_was(model, data):
    rows = []
    for block in model.blocks:
        block.norm.register_forward_hook(lambda module, given, out: rows.append(out.shape[1]))
    points = strec_sparsity.sweep(model, data, filter_seen=True, seed=0)
    full = rows[-3 * strec_sparsity.ROUNDS :]

    assert [point.trained for point in points] == [False, False, True, False, False, False]
    assert len({point.ndcg for point in points}) > 3
    assert all(point.microseconds > 0 for point in points)
    expected = [1 - (2 * k + 1) / 3 / LENGTH for k in (10, 6, 4, 3, 2, 1)]
    assert [point.sparsity for point in points] == pytest.approx(expected)
    assert full == [1, 1, 1] * strec_sparsity.ROUNDS
    rows.clear()
    model(Batch(torch.ones(1, LENGTH).long(), torch.zeros(1, LENGTH), torch.ones(1).long()), last=True)
    assert rows == [4, 4, 1]


def test_rows_that_no_share_gives_are_a_point_of_their_own(data):
    model = make_model("strec", num_items=data.num_items, length=LENGTH, layers=3, k=(10, 7, 1)).eval()
    points = strec_sparsity.sweep(model, data, filter_seen=True, seed=0)

    assert [point.sparsity for point in points if point.trained] == pytest.approx([1 - 18 / 30])


def test_no_more_cases_than_the_limit_are_ranked_and_the_seed_draws_them(model, data, monkeypatch):
    monkeypatch.setattr(strec_sparsity, "CASES", 5)
    first, again, other = (
        [point.ndcg for point in strec_sparsity.sweep(model, data, filter_seen=True, seed=seed)] for seed in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize(("architecture", "options"), [("sasrec", {}), ("strec", {"sampling": "none"})])
def test_a_model_that_computes_every_row_has_no_points(data, architecture, options):
    model = make_model(architecture, num_items=data.num_items, length=LENGTH, **options).eval()

    assert strec_sparsity.sweep(model, data, filter_seen=True, seed=0) == []
