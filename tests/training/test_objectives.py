"""Inputs and targets of every objective, the loss and its contrastive term; no target is at or after the cut."""

import numpy as np
import pytest
import torch
from support import draw_windows, make_model, run, run_pretrain

from seqrec.config import ConfigError, FinetuneConfig
from seqrec.data import sequences
from seqrec.models.flash4rec import FLASH4RecOptions
from seqrec.training import batches, losses, objectives
from seqrec.training.batches import Windows
from seqrec.training.step import LossTerms

PLAIN = FinetuneConfig()


def example_of(data, *, length=12, objective="causal", seed=0, **config):
    """Return the windows of an epoch, and the example that holds them all."""
    options, chosen = draw_windows(data, length=length, objective=objective)
    return chosen, objectives.example(data, options, FinetuneConfig(**config), chosen, seed=seed)


def train_events(data, user):
    return data.items[data.start[user] : data.train_stop[user]].tolist()


def test_causal_positions_predict_the_next_event(data):
    chosen, example = example_of(data)

    assert example.number == int(chosen.width.sum()) == int((example.target_BL > 0).sum())
    assert example.weight == pytest.approx(1 / example.number)
    assert chosen.user.tolist() == list(range(data.num_users))
    for row, user in enumerate(chosen.user.tolist()):
        events = train_events(data, user)[-13:]
        real = example.batch.items[row] > 0
        assert example.batch.items[row][real].tolist() == events[:-1]
        assert example.target_BL[row][real].tolist() == events[1:]
        assert (example.target_BL[row][~real] == 0).all()


def test_in_training_the_request_comes_at_the_time_of_the_last_target(data):
    _, chosen = draw_windows(data, length=12)

    example = objectives.example(data, FLASH4RecOptions(length=12, request_time=True), PLAIN, chosen, seed=0)

    last = data.times[chosen.stop - 1] - data.times[chosen.stop - 2]
    assert example.batch.times[:, -1].tolist() == (-last).tolist()
    assert bool(last.all())


def test_last_takes_every_prefix(data):
    chosen, example = example_of(data, objective="last", length=4)

    assert len(chosen.user) == int((data.train_stop - data.start - 1).sum()) == example.number
    assert (example.target_BL[:, :-1] == 0).all()
    for row, (user, stop) in enumerate(zip(chosen.user.tolist(), chosen.stop.tolist(), strict=True)):
        place = stop - int(data.start[user])
        events = train_events(data, user)[:place]
        assert example.target_BL[row, -1] == events[-1]
        kept = example.batch.items[row][example.batch.items[row] > 0].tolist()
        assert kept == events[:-1][-4:]


def test_cloze_masks_what_it_predicts(data):
    settings = {"objective": "cloze", "mask_probability": 0.3, "mask_last_share": 0.0}
    chosen, example = example_of(data, seed=4, **settings)

    mask = data.num_items + 1
    masked = example.batch.items == mask
    assert torch.equal(masked, example.target_BL > 0)
    assert example.number == int(masked.sum())
    assert masked.any(1).all()
    restored = torch.where(masked, example.target_BL, example.batch.items)
    assert torch.equal(restored, sequences.window(data, chosen.user, chosen.stop, 12).items)
    assert 0.2 < masked.sum() / (restored > 0).sum() < 0.4
    (_, again), (_, other) = (example_of(data, seed=seed, **settings) for seed in (4, 5))
    assert torch.equal(again.batch.items, example.batch.items)
    assert not torch.equal(other.batch.items, example.batch.items)


def test_cloze_masks_the_last_event_of_a_share(data):
    _, example = example_of(data, objective="cloze", mask_last_share=1.0)

    assert (example.target_BL[:, :-1] == 0).all()
    assert (example.target_BL[:, -1] > 0).all()


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("objective", ["causal", "last", "cloze"])
def test_processes_share_a_step(data, objective, resident):
    """Each has every third window, or the windows of neighbouring users, so that it reads one part of a mapped file."""
    options, every = draw_windows(data, objective=objective)
    order, config = torch.randperm(len(every.user)), FinetuneConfig(resident=resident)
    chosen = Windows(*(values[order] for values in every))

    whole = objectives.example(data, options, config, chosen, seed=3)
    parts = [objectives.example(data, options, config, chosen, seed=3, process=p, processes=3) for p in range(3)]

    thirds = torch.cat([torch.arange(process, len(order), 3) for process in range(3)])
    expected = thirds if resident else chosen.user.argsort(stable=True)
    assert torch.equal(torch.cat([part.batch.user for part in parts]), whole.batch.user[expected])
    assert torch.equal(torch.cat([part.batch.items for part in parts]), whole.batch.items[expected])
    assert torch.equal(torch.cat([part.target_BL for part in parts]), whole.target_BL[expected])
    assert sum(part.number for part in parts) == whole.number
    assert [part.weight for part in parts] == pytest.approx([3 * whole.weight] * 3)


@pytest.mark.parametrize("sampler", ["uniform", "popularity", "in_batch"])
def test_a_process_without_a_window_draws_too(data, sampler):
    loss = objectives.Loss(FinetuneConfig(loss="sampled_ce", sampler=sampler), data.count)
    assert loss.draw(torch.zeros(0, dtype=torch.long), 5).shape == (5,)


@pytest.mark.parametrize(
    ("sampler", "expected", "drawn"),
    [
        ("uniform", [0, 1 / 4, 1 / 4, 1 / 4, 1 / 4], [0, 1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("popularity", [0, 0.6, 0, 0.3, 0.1], [0, 0.6, 0, 0.3, 0.1]),
        ("in_batch", [0, 0.6, 0, 0.3, 0.1], [0, 0.75, 0, 0.25, 0]),  # expected of any step, drawn from this one
    ],
)
def test_negatives_follow_their_distribution(sampler, expected, drawn):
    loss = objectives.Loss(FinetuneConfig(sampler=sampler, negatives=10), torch.tensor([0, 6, 0, 3, 1]))

    found = torch.bincount(loss.draw(torch.tensor([1, 1, 1, 3]), 20_000), minlength=5) / 20_000

    torch.testing.assert_close(found, torch.tensor(drawn), atol=0.015, rtol=0)
    torch.testing.assert_close(loss.log_expected_V.exp(), 10 * torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("objective", ["causal", "last", "cloze"])
def test_the_past_of_a_target_is_the_users_events_before_it(data, objective):
    """With cloze also the ones behind it: all that the model is shown."""
    options, chosen = draw_windows(data, objective=objective)
    example = objectives.example(data, options, PLAIN, chosen, seed=0)
    positions = 1 if objective == "last" else 5  # what the models of the objective return
    target_BP = example.target_BL[:, -positions:]
    query_N = target_BP.flatten().nonzero()[:, 0]

    past = objectives.past_items(example, options, query_N, positions)

    for n, query in enumerate(query_N.tolist()):
        row, column = divmod(query, positions)
        events = [0] * 6 + data.items[data.start[chosen.user[row]] : chosen.stop[row]].tolist()
        if objective == "cloze":
            targets = example.target_BL[row].tolist()
            expected = [item for item, target in zip(events[-5:], targets, strict=True) if item and not target]
        else:
            expected = [item for item in events[-6:-1][: column + 6 - positions] if item]
        shown = past.items_BL[past.row_N[n]][: past.stop_N[n]].tolist()
        assert [item for item in shown if item not in (0, data.num_items + 1)] == expected


@pytest.mark.parametrize(
    ("number", "batch_size", "processes", "sizes"),
    [(100, 32, 1, [32] * 3), (100, 33, 2, [32] * 3), (20, 64, 1, [20]), (21, 64, 2, [20]), (64, 64, 4, [64])],
)
def test_batches_of_a_contrast_have_the_asked_size(number, batch_size, processes, sizes):
    plan = batches.plan_of_size(number, batch_size, processes, torch.Generator().manual_seed(1))

    assert [len(batch) for batch in plan] == sizes
    chosen = torch.cat(plan)
    assert len(chosen.unique()) == len(chosen)
    assert not torch.equal(chosen, chosen.sort().values)


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


@pytest.mark.parametrize("labels", [[7, 3, 7, 1, 3], [2] * 5])  # rows of one target have nothing to tell apart
def test_info_nce_equals_a_loop_over_pairs(labels):
    view, other, label = torch.randn(5, 4), torch.randn(5, 4), torch.tensor(labels)

    got = losses.info_nce(view, other, label)

    np.testing.assert_allclose(got, pairwise(view.numpy(), other.numpy(), label.numpy()), rtol=1e-4)


def test_a_step_has_the_mean_loss_of_its_targets_and_the_contrast_of_its_windows(data):
    """Without dropout the two views of a window are equal, and can be computed again."""
    model = make_model("sasrec", num_items=data.num_items, dropout=0.0)
    config, (_, example) = FinetuneConfig(contrast=0.3), example_of(data)

    terms = LossTerms(model, objectives.Loss(config, data.count), config)(example)

    target, query = example.target_BL, model(example.batch)
    scores = (query @ model.item_vectors().T)[..., 1:]
    expected = torch.nn.functional.cross_entropy(scores[target > 0], target[target > 0] - 1)
    torch.testing.assert_close(terms["task"], expected)
    view = query[:, -1].detach().numpy()
    assert terms["contrast"].item() == pytest.approx(0.3 * pairwise(view, view, target[:, -1].numpy()).mean(), rel=1e-4)


@pytest.mark.parametrize("estimator", ["arm", "ar"])
def test_the_contrast_of_a_model_with_masks_does_not_reach_them(data, estimator):
    config, (_, example) = FinetuneConfig(contrast=0.3), example_of(data)
    model = make_model("rec_denoiser", num_items=data.num_items, dropout=0.2, estimator=estimator).train()

    LossTerms(model, objectives.Loss(config, data.count), config)(example)["contrast"].backward()

    for name, weight in model.named_parameters():
        if "raw_XLL" in name:  # only the task trains masks
            assert weight.grad is None, name
    assert sum(bool(weight.grad.any()) for weight in model.parameters() if weight.grad is not None) > 10


def test_a_contrast_needs_a_model_that_predicts_what_follows(prepared, tmp_path):
    with pytest.raises(ConfigError, match=r"finetune\.contrast: needs a model that predicts what follows"):
        run(prepared, tmp_path, "bert4rec", options={"d_model": 16, "length": 12}, contrast=0.1)


def test_a_contrast_is_of_two_views_that_are_computed_alike(prepared, tmp_path):
    options = {"d_model": 16, "length": 12, "layers": 2}
    with pytest.raises(ConfigError, match=r"pretrain\.contrast: STRec computes a second view .* in another way"):
        run_pretrain("strec", prepared.parent, tmp_path, options, contrast=0.1)
