"""Inputs and targets of every objective, and the loss; no target of training is at or after the cut."""

import pytest
import torch
from support import draw_windows, make_model

from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.models.flash4rec import FLASH4RecOptions
from seqrec.training import batches, objectives
from seqrec.training.batches import Windows
from seqrec.training.step import LossTerms


@pytest.fixture
def data(prepared):
    return sequences.load(prepared)


def train_events(data, user):
    return data.items[data.start[user] : data.train_stop[user]].tolist()


def test_causal_positions_predict_the_next_event(data):
    options, chosen = draw_windows(data, length=12)

    example = objectives.example(data, options, FinetuneConfig(), chosen, seed=0)

    assert example.number == int(chosen.width.sum()) == int((example.target_BL > 0).sum())
    assert example.weight == pytest.approx(1 / example.number)
    for row, user in enumerate(chosen.user.tolist()):
        events = train_events(data, user)[-13:]
        real = example.batch.items[row] > 0
        assert example.batch.items[row][real].tolist() == events[:-1]
        assert example.target_BL[row][real].tolist() == events[1:]
        assert (example.target_BL[row][~real] == 0).all()


def test_in_training_the_request_comes_at_the_time_of_the_last_target(data):
    _, chosen = draw_windows(data, length=12)

    example = objectives.example(data, FLASH4RecOptions(length=12, request_time=True), FinetuneConfig(), chosen, seed=0)

    last = data.times[chosen.stop - 1] - data.times[chosen.stop - 2]
    assert example.batch.times[:, -1].tolist() == (-last).tolist()
    assert bool(last.all())


def test_last_takes_every_prefix(data):
    options, chosen = draw_windows(data, objective="last", length=4)

    example = objectives.example(data, options, FinetuneConfig(), chosen, seed=0)

    assert len(chosen.user) == int((data.train_stop - data.start - 1).sum()) == example.number
    assert (example.target_BL[:, :-1] == 0).all()
    for row, (user, stop) in enumerate(zip(chosen.user.tolist(), chosen.stop.tolist(), strict=True)):
        place = stop - int(data.start[user])
        events = train_events(data, user)[:place]
        assert example.target_BL[row, -1] == events[-1]
        kept = example.batch.items[row][example.batch.items[row] > 0].tolist()
        assert kept == events[:-1][-4:]


def test_cloze_masks_what_it_predicts(data):
    options, chosen = draw_windows(data, objective="cloze", length=12)
    config = FinetuneConfig(mask_probability=0.3, mask_last_share=0.0)

    example = objectives.example(data, options, config, chosen, seed=4)

    mask = data.num_items + 1
    masked = example.batch.items == mask
    assert torch.equal(masked, example.target_BL > 0)
    assert example.number == int(masked.sum())
    assert masked.any(1).all()
    restored = torch.where(masked, example.target_BL, example.batch.items)
    assert torch.equal(restored, sequences.window(data, chosen.user, chosen.stop, 12).items)
    assert 0.2 < masked.sum() / (restored > 0).sum() < 0.4
    again = objectives.example(data, options, config, chosen, seed=4)
    other = objectives.example(data, options, config, chosen, seed=5)
    assert torch.equal(again.batch.items, example.batch.items)
    assert not torch.equal(other.batch.items, example.batch.items)


def test_cloze_masks_the_last_event_of_a_share(data):
    options, chosen = draw_windows(data, objective="cloze", length=12)

    example = objectives.example(data, options, FinetuneConfig(mask_last_share=1.0), chosen, seed=0)

    assert (example.target_BL[:, :-1] == 0).all()
    assert (example.target_BL[:, -1] > 0).all()


@pytest.mark.parametrize("objective", ["causal", "last", "cloze"])
def test_processes_share_a_step(data, objective):
    options, chosen = draw_windows(data, objective=objective)
    config = FinetuneConfig()

    whole = objectives.example(data, options, config, chosen, seed=3)
    parts = [objectives.example(data, options, config, chosen, seed=3, process=p, processes=2) for p in (0, 1)]

    assert sum(part.number for part in parts) == whole.number
    for process, part in enumerate(parts):
        assert torch.equal(part.batch.items, whole.batch.items[process::2])
        assert torch.equal(part.target_BL, whole.target_BL[process::2])
        assert part.weight == pytest.approx(2 * whole.weight)


def test_the_loss_of_a_step_is_the_mean_over_its_targets(data):
    model = make_model("sasrec", num_items=data.num_items, dropout=0.0)
    _, every = draw_windows(data, length=12)
    chosen = Windows(*(x[:5] for x in every))
    example = objectives.example(data, model.options, FinetuneConfig(), chosen, seed=0)
    loss = objectives.Loss(FinetuneConfig(), data.count)

    terms = LossTerms(model, loss, FinetuneConfig())(example)

    target = example.target_BL
    scores = (model(example.batch) @ model.item_vectors().T)[..., 1:]
    expected = torch.nn.functional.cross_entropy(scores[target > 0], target[target > 0] - 1)
    torch.testing.assert_close(terms["task"], expected)


@pytest.mark.parametrize("sampler", ["uniform", "popularity"])
def test_negatives_follow_their_distribution(sampler):
    count = torch.tensor([0, 6, 0, 3, 1])
    loss = objectives.Loss(FinetuneConfig(sampler=sampler, negatives=10), count)

    drawn = torch.bincount(loss.draw(torch.tensor([1]), 20_000), minlength=5) / 20_000

    share = torch.tensor([0, 1, 1, 1, 1]) / 4 if sampler == "uniform" else count / 10
    torch.testing.assert_close(drawn, share, atol=0.015, rtol=0)
    torch.testing.assert_close(loss.log_expected_V.exp(), 10 * share, atol=1e-6, rtol=1e-5)


def test_negatives_in_the_batch_are_its_targets_in_their_proportion():
    loss = objectives.Loss(FinetuneConfig(sampler="in_batch", negatives=10), torch.tensor([0, 6, 1, 3, 0]))

    drawn = torch.bincount(loss.draw(torch.tensor([1, 1, 1, 3]), 20_000), minlength=5) / 20_000

    torch.testing.assert_close(drawn, torch.tensor([0, 0.75, 0, 0.25, 0]), atol=0.015, rtol=0)
    torch.testing.assert_close(loss.log_expected_V.exp()[1:4], torch.tensor([6.0, 1.0, 3.0]))  # expected of any step


@pytest.mark.parametrize("objective", ["causal", "last", "cloze"])
def test_the_past_of_a_target_is_the_users_events_before_it(data, objective):
    """With cloze also the ones behind it: all that the model is shown."""
    options, chosen = draw_windows(data, objective=objective)
    example = objectives.example(data, options, FinetuneConfig(), chosen, seed=0)
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
