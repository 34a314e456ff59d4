"""The contrastive term against a loop over its pairs."""

import numpy as np
import pytest
import torch
from support import draw_windows, losses_of, make_model, run

from seqrec.config import ConfigError, FinetuneConfig
from seqrec.data import sequences
from seqrec.training import losses, objectives
from seqrec.training.step import LossTerms


@pytest.fixture
def data(prepared):
    return sequences.load(prepared)


def pairwise(view, other, label):
    """-log softmax at the partner, pair by pair."""
    views, labels, half = np.concatenate([view, other]), np.concatenate([label, label]), len(label)
    values = []
    for i in range(2 * half):
        partner = (i + half) % (2 * half)
        rivals = [j for j in range(2 * half) if labels[j] != labels[i]]
        scores = np.exp([views[i] @ views[j] for j in [partner, *rivals]])
        values.append(-np.log(scores[0] / scores.sum()))
    return np.array(values)


def test_values_equal_a_loop_over_pairs():
    view, other, label = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([7, 3, 7, 1, 3])

    got = losses.info_nce(view, other, label)

    np.testing.assert_allclose(got, pairwise(view.numpy(), other.numpy(), label.numpy()), rtol=1e-4)


def test_rows_that_share_one_target_have_nothing_to_tell_apart():
    assert losses.info_nce(torch.randn(3, 4), torch.randn(3, 4), torch.tensor([2, 2, 2])).tolist() == [0.0] * 6


@pytest.mark.parametrize("estimator", ["arm", "ar"])
def test_a_model_with_masks_has_views_with_a_gradient_that_does_not_reach_them(data, estimator):
    _, windows = draw_windows(data, length=12)
    config = FinetuneConfig(contrast=0.3)
    model = make_model("rec_denoiser", num_items=data.num_items, dropout=0.2, estimator=estimator).train()

    step = LossTerms(model, objectives.Loss(config, data.count), config)
    step(objectives.example(data, model.options, config, windows, seed=0))["contrast"].backward()

    for name, weight in model.named_parameters():
        if "raw_XLL" in name:  # only the task trains masks
            assert weight.grad is None, name
    assert sum(bool(weight.grad.any()) for weight in model.parameters() if weight.grad is not None) > 10


def test_terms_of_a_step(data):
    """Without dropout the two views are equal, and can be computed again."""
    torch.manual_seed(0)
    options, windows = draw_windows(data, length=12)
    config = FinetuneConfig(contrast=0.3)
    model = make_model("sasrec", num_items=data.num_items, dropout=0.0).train()
    example = objectives.example(data, options, config, windows, seed=0)
    plain = LossTerms(model, objectives.Loss(FinetuneConfig(), data.count), FinetuneConfig())(example)

    terms = LossTerms(model, objectives.Loss(config, data.count), config)(example)

    view = model(example.batch)[:, -1].detach().numpy()
    assert set(terms) == {"task", "contrast"}
    assert terms["task"].item() == plain["task"].item()
    expected = 0.3 * pairwise(view, view, example.target_BL[:, -1].numpy()).mean()
    assert terms["contrast"].item() == pytest.approx(expected, rel=1e-4)


def test_a_run_logs_the_term(prepared, tmp_path):
    run(prepared, tmp_path, "flash4rec", options={"d_model": 16, "length": 12}, epochs=1, contrast=0.3)

    (record,) = losses_of(tmp_path)
    assert record["loss/contrast"] > 0


def test_a_model_that_predicts_masked_items_is_refused(prepared, tmp_path):
    with pytest.raises(ConfigError, match=r"finetune\.contrast: needs a model that predicts what follows"):
        run(prepared, tmp_path, "bert4rec", options={"d_model": 16, "length": 12}, contrast=0.1)
