"""S3-Rec: its four terms against sums written out, item by item."""

from __future__ import annotations

import pytest
import torch
from equations import stream
from support import add_noise, make_batch, make_model

from seqrec.models.s3rec import draw_segments

MASK = 31
HISTORY = [3, 7, 2, 9, 4]


def build(**options):
    model = make_model("s3rec", dropout=0.0, **options)
    add_noise(model, 0.1)
    model.enter("mutual")
    return model.eval()


def read(model, items):
    """Outputs of a history that is read from both sides."""
    return stream(model.stream, model.items.weight[items], causal=False)


def match(model, head, out, other):
    return torch.sigmoid(model.heads[head](out) @ other)


def binary_cross_entropy(model, head, out, item):
    own = [value for value in model.value_VM[item].tolist() if value]
    total = torch.zeros(())
    for value in range(1, len(model.attributes.weight)):
        p = match(model, head, out, model.attributes.weight[value])
        total = total - (p.log() if value in own else (1 - p).log())
    return total


@torch.no_grad()
def test_the_terms_of_items_and_attributes():
    model = build()
    items, masked = torch.tensor([HISTORY]), torch.tensor([[False, True, False, True, True]])
    other = torch.tensor([[1, 20, 1, 2, 30]])  # the 2 is in the history itself
    out = read(model, [3, MASK, 2, MASK, MASK])

    got = model.item_terms(items, masked, other)

    known = sum(binary_cross_entropy(model, "item_attribute", out[p], HISTORY[p]) for p in (0, 2))
    hidden = sum(binary_cross_entropy(model, "attribute", out[p], HISTORY[p]) for p in (1, 3, 4))
    nearer = torch.zeros(())
    for p in (1, 4):
        own, foreign = (match(model, "item", out[p], model.items.weight[item]) for item in (HISTORY[p], other[0, p]))
        nearer = nearer - torch.sigmoid(own - foreign).log()
    torch.testing.assert_close(got["item_attribute"], 0.2 * known, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got["attribute"], hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got["item"], nearer, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_term_of_segments():
    model = build()
    items = torch.tensor([HISTORY, [0, 0, 0, 0, 6]])
    inside = torch.tensor([[False, True, True, False, False], [False] * 5])
    other = torch.tensor([[1, 21, 22, 1, 1]] * 2)

    got = model.segment_term(items, inside, other)

    context = read(model, [3, MASK, MASK, 9, 4])[-1]
    own, foreign = (read(model, [MASK, *pair, MASK, MASK])[-1] for pair in ([7, 2], [21, 22]))
    difference = match(model, "segment", context, own) - match(model, "segment", context, foreign)
    torch.testing.assert_close(got, -torch.sigmoid(difference).log() / 2, atol=1e-5, rtol=1e-5)


def test_a_segment_is_a_run_of_at_most_half_a_history():
    items = torch.tensor([[0, 0, 0, 5, 6], [1, 2, 3, 4, 9], [0, 0, 0, 0, 8], [0, 0, 0, 0, 0]]).repeat(200, 1)

    inside, other = draw_segments(items)

    size = inside.sum(1).view(-1, 4)
    assert (size[:, 0] == 1).all()
    assert set(size[:, 1].tolist()) == {1, 2}
    assert (size[:, 2:] == 0).all()
    assert {tuple(row) for row in inside[1::4].int().tolist()} >= {(1, 1, 0, 0, 0), (0, 0, 0, 1, 1), (0, 0, 1, 0, 0)}
    flat = "".join(str(item) for item in items.flatten().tolist() if item)
    for row, chosen in zip(other[1::4], inside[1::4], strict=True):
        assert "".join(map(str, row[chosen].tolist())) in flat


def test_the_last_item_of_a_row_is_always_masked_and_of_the_others_a_share(monkeypatch):
    model, masks = build(mask_probability=0.2), []
    monkeypatch.setattr(model, "item_terms", lambda items, masked, other: masks.append(masked) or {})
    rows = make_batch([[3, 7, 2, 9, 4], [5, 1], [8, 4]] * 1000)

    model.training_loss(rows, lambda _: None)

    real, masked = rows.items != 0, masks[0]
    assert masked[:, -1].all()
    assert not masked[~real].any()
    assert masked[:, :-1].sum() / real[:, :-1].sum() == pytest.approx(0.2, abs=0.02)
