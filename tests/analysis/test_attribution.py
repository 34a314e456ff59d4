"""What drove a score: against histories that really lack an event, one at a time."""

from __future__ import annotations

import pytest
import torch
from support import make_model, trained

from seqrec.analysis import attribution
from seqrec.models.base import PAD, Batch

LENGTH = 6
HISTORIES = [[3], [5, 6, 5, 7], [2, 9, 4, 8, 1, 3], [7, 2, 9, 4, 8, 1, 3, 6, 5]]  # the last ones fill the window
TIMES = [[0.0], [0.0, 60.0, 60.0, 7200.0], *([float(n * n * 1000) for n in range(length)] for length in (6, 9))]
ITEMS = torch.tensor([4, 1, 9, 2])


def left_padded(rows, fill):
    width = max(map(len, rows))
    return torch.tensor([[fill] * (width - len(row)) + row for row in rows])


def histories() -> Batch:
    times = [[time - row[-1] for time in row] for row in TIMES]
    return Batch(left_padded(HISTORIES, PAD), left_padded(times, 0.0), torch.tensor([1, 2, 0, 3]))


def score(model, events, user, item):
    """Score one history the plain way: (item, time) pairs, oldest first, with no padding in front but what it takes."""
    cloze = model.options.objective == "cloze"
    events = events[len(events) - min(len(events), LENGTH - cloze) :]
    items = torch.tensor([[event for event, _ in events] or [PAD]])
    times = torch.tensor([[time - events[-1][1] for _, time in events] or [0.0]])
    batch = Batch(items, times, torch.tensor([user]))
    batch = model.asked(batch)
    return float(model(batch, last=True)[0, 0] @ model.item_vectors()[item])


@pytest.mark.parametrize(("architecture", "objective"), trained("causal", "cloze"))
@torch.no_grad()
def test_a_drop_is_the_score_less_that_of_the_history_without_the_event(architecture, objective):
    model = make_model(architecture, length=LENGTH, objective=objective).eval()
    batch = histories()

    drops = attribution.leave_one_out(model, batch, ITEMS)

    assert drops.shape == batch.items.shape
    expected = torch.zeros_like(drops)
    for row, (items, times) in enumerate(zip(HISTORIES, TIMES, strict=True)):
        events, user, item = list(zip(items, times, strict=True)), int(batch.user[row]), int(ITEMS[row])
        whole = score(model, events, user, item)
        for back in range(1, min(len(events), LENGTH - (objective == "cloze")) + 1):
            without = events[:-back] + events[len(events) - back + 1 :]
            expected[row, -back] = whole - score(model, without, user, item)
    torch.testing.assert_close(drops, expected, atol=2e-5, rtol=1e-3)
    assert architecture == "mfbpr" or expected.abs().max() > 1e-4


def test_blocks_change_nothing(monkeypatch):
    model = make_model("gru4rec", length=LENGTH).eval()
    whole = attribution.leave_one_out(model, histories(), ITEMS)

    monkeypatch.setattr(attribution, "POSITIONS_PER_PASS", 13)

    torch.testing.assert_close(attribution.leave_one_out(model, histories(), ITEMS), whole, atol=1e-6, rtol=1e-4)


EXPOSED = {"sasrec", "esasrec", "flash4rec", "bert4rec", "tisasrec", "ssept", "rec_denoiser", "zesrec", "unisrec"}
EXPOSED |= {"recformer", "s3rec", "recguru"}


@torch.no_grad()
def test_attention_is_given_where_it_is_over_events(architecture):
    name, cls = architecture
    for objective in cls.objectives - {"last"}:
        model, batch = make_model(name, length=LENGTH, objective=objective).eval(), histories()

        weight = attribution.attention(model, batch)

        assert (weight is not None) == (name in EXPOSED)
        if weight is not None:
            assert weight.shape == batch.items.shape
            assert (weight[batch.items == PAD] == 0).all()
            assert (weight[:, :3] == 0).all()  # nobody sees more than 6 of 9
            assert (weight[-1, 4:] > 0).all()
            assert (weight.sum(1) <= 1 + 1e-6).all()


@torch.no_grad()
def test_attention_mixes_the_values_as_the_model_does():
    """One head and one layer: what the block adds to its query is the values of the events, mixed by these weights."""
    model, batch = make_model("sasrec", length=9, layers=1, heads=1).eval(), histories()
    block = model.blocks[0]
    mixed = []
    block.attention.to_out.register_forward_pre_hook(lambda _, arguments: mixed.append(arguments[0]))

    weight_BL = attribution.attention(model, batch)

    source_BLD = model.items(batch.items) * model.options.d_model**0.5 + model.positions[-9:]
    expected = torch.einsum("bl,bld->bd", weight_BL, block.attention.to_value(source_BLD))
    torch.testing.assert_close(mixed[0][:, 0], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("backbone", ["sasrec", "bert4rec"])
def test_masks_take_from_attention(backbone):
    objective = {"sasrec": "causal", "bert4rec": "cloze"}[backbone]
    model = make_model("rec_denoiser", length=9, heads=1, binary=True, backbone=backbone, objective=objective).eval()
    for mask in model.masks:
        mask.raw_XLL.normal_(std=10.0)
    batch, seen = histories(), 9 - (objective == "cloze")
    answer = model(batch, last=True)

    before, after = attribution.masked_attention(model, batch)

    mask = model.masks[-1].at_test(9)[0, :seen, :seen]
    torch.testing.assert_close(after, before * mask)
    assert 0 < (mask == 0).float().mean() < 1
    assert before.shape == (4, seen, seen)
    if backbone == "sasrec":
        torch.testing.assert_close(before.sum(2), torch.ones(4, seen))
        real = batch.items != PAD
        torch.testing.assert_close(attribution.attention(model, batch), after[:, -1] * real)
    assert torch.equal(model(batch, last=True), answer)


def test_there_are_no_masks_to_show_without_masks():
    for model in (make_model("sasrec"), make_model("rec_denoiser", attention="full", l0=0.0)):
        assert attribution.masked_attention(model.eval(), histories()) is None
