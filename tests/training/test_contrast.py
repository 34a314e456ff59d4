"""The contrastive term against a loop over its pairs, and what partners are drawn from."""

import numpy as np
import pytest
import torch
from support import draw_windows, losses_of, make_model, run

from seqrec.config import ConfigError, FinetuneConfig
from seqrec.data import sequences
from seqrec.models.base import Options
from seqrec.training import contrast, losses, objectives
from seqrec.training.step import LossTerms

BOTH = {"weight": 0.3, "same_target": 0.2, "temperature": 0.5, "similarity": "cosine"}


@pytest.fixture
def data(prepared):
    return sequences.load(prepared)


def pairwise(view, other, label, temperature, cosine):
    """-log softmax at the partner, pair by pair."""
    views, labels, half = np.concatenate([view, other]), np.concatenate([label, label]), len(label)
    if cosine:
        views = views / np.linalg.norm(views, axis=1, keepdims=True)
    values = []
    for i in range(2 * half):
        partner = (i + half) % (2 * half)
        rivals = [j for j in range(2 * half) if labels[j] != labels[i]]
        scores = np.exp([views[i] @ views[j] / temperature for j in [partner, *rivals]])
        values.append(-np.log(scores[0] / scores.sum()))
    return np.array(values)


@pytest.mark.parametrize("cosine", [False, True])
def test_values_equal_a_loop_over_pairs(cosine):
    view, other, label = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([7, 3, 7, 1, 3])

    got = losses.info_nce(view, other, label, temperature=0.5, cosine=cosine)

    np.testing.assert_allclose(got, pairwise(view.numpy(), other.numpy(), label.numpy(), 0.5, cosine), rtol=1e-4)


def test_rows_that_share_one_target_have_nothing_to_tell_apart():
    assert losses.info_nce(torch.randn(3, 4), torch.randn(3, 4), torch.tensor([2, 2, 2])).tolist() == [0.0] * 6


def test_partners_are_every_training_event_of_the_same_item_but_first_ones(data):
    partners = contrast.SameTarget(data, FinetuneConfig())
    item = int(data.count[1:].argmax()) + 1
    allowed = [
        (user, place)
        for user in range(data.num_users)
        for place in range(int(data.start[user]) + 1, int(data.train_stop[user]))
        if int(data.items[place]) == item
    ]

    drawn = partners.draw(torch.full((2000,), allowed[0][1]), seed=3)

    assert set(zip(*(x.tolist() for x in drawn), strict=True)) == set(allowed)
    assert len(allowed) > 5


def test_a_partner_is_the_window_before_its_target(data):
    partners = contrast.SameTarget(data, FinetuneConfig())
    target = data.train_stop[:4] - 1

    batch = partners.windows(data, target, Options(length=8), seed=5)

    user, place = partners.draw(target, seed=5)
    assert torch.equal(data.items[place], data.items[target])
    for row in range(4):
        events = data.items[data.start[user[row]] : place[row]].tolist()[-8:]
        assert batch.items[row][batch.items[row] > 0].tolist() == events


@pytest.mark.parametrize("estimator", ["arm", "ar"])
def test_a_model_with_masks_has_views_with_a_gradient_that_does_not_reach_them(data, estimator):
    _, windows = draw_windows(data, length=12)
    config = FinetuneConfig(contrast={"weight": 0.3})
    model = make_model("rec_denoiser", num_items=data.num_items, dropout=0.2, estimator=estimator).train()

    step = LossTerms(model, objectives.Loss(config, data.count), config)
    step(objectives.example(data, model.options, config, windows, seed=0))["contrast"].backward()

    for name, weight in model.named_parameters():
        if "raw_XLL" in name:  # only the task trains masks
            assert weight.grad is None, name
    assert sum(bool(weight.grad.any()) for weight in model.parameters() if weight.grad is not None) > 10


def test_terms_of_a_step(data):
    """Without dropout the first two views are equal, and all can be computed again."""
    torch.manual_seed(0)
    options, windows = draw_windows(data, length=12)
    config = FinetuneConfig(contrast=BOTH)
    model = make_model("sasrec", num_items=data.num_items, dropout=0.0).train()
    partners = contrast.same_target(data, config)
    example = objectives.example(data, options, config, windows, seed=0, same_target=partners)
    plain = LossTerms(model, objectives.Loss(FinetuneConfig(), data.count), FinetuneConfig())(example)

    terms = LossTerms(model, objectives.Loss(config, data.count), config)(example)

    view, other = (model(batch)[:, -1].detach().numpy() for batch in (example.batch, example.partner))
    target = example.target_BL[:, -1].numpy()
    assert set(terms) == {"task", "contrast", "contrast_target"}
    assert terms["task"].item() == plain["task"].item()
    assert terms["contrast"].item() == pytest.approx(0.3 * pairwise(view, view, target, 0.5, True).mean(), rel=1e-4)
    expected = 0.2 * pairwise(view, other, target, 0.5, True).mean()
    assert terms["contrast_target"].item() == pytest.approx(expected, rel=1e-4)


def test_a_run_logs_the_terms(prepared, tmp_path):
    run(prepared, tmp_path, "flash4rec", options={"d_model": 16, "length": 12}, epochs=1, contrast=BOTH)

    (record,) = losses_of(tmp_path)
    assert record["loss/contrast"] > 0
    assert record["loss/contrast_target"] > 0


def test_what_cannot_be_computed_is_refused(prepared, tmp_path):
    with pytest.raises(ConfigError, match=r"finetune\.contrast: needs a model that predicts what follows"):
        run(prepared, tmp_path / "a", "bert4rec", options={"d_model": 16, "length": 12}, contrast={"weight": 0.1})
    with pytest.raises(ConfigError, match=r"finetune\.contrast\.same_target: needs finetune\.resident"):
        run(prepared, tmp_path / "b", contrast=BOTH, resident=False)


@pytest.mark.parametrize("values", [{"weight": 0.0}, {"weight": -1}, {"temperature": 0}, {"wait": 1}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ConfigError, match=r"contrast.*(weight|temperature|wait)"):
        FinetuneConfig(contrast=values)
