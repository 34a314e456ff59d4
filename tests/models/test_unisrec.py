"""UniSRec against an encoder of torch's own with the same weights, and against sums written out."""

from __future__ import annotations

import pytest
import torch
from equations import stream
from support import add_noise, make_batch, make_model
from torch.nn import functional as F

from seqrec.models.base import Catalogue
from seqrec.models.unisrec import contrast, drop_items

ROWS = [[3, 7, 2, 9, 4], [5, 1], [8]]


def build(**options):
    options = {"dropout": 0.0, "adaptor_dropout": 0.0} | options
    model = make_model("unisrec", experts=3, **options)
    add_noise(model, 0.1)
    return model.eval()


def adapted(model, text):
    """Equations 2 to 5, an expert after the other."""
    adaptor, width = model.adaptor, model.options.d_model
    gates = torch.softmax(text @ adaptor.gate.weight.T, -1)
    experts = []
    for number, shift in enumerate(adaptor.shifts):
        whitening = adaptor.maps.weight[number * width : (number + 1) * width]
        experts.append((text - shift) @ whitening.T)
    return sum(gates[..., g : g + 1] * expert for g, expert in enumerate(experts))


@pytest.mark.parametrize("ids", [False, True])
@torch.no_grad()
def test_scores_are_those_of_the_papers_equations(ids):
    model = build(ids=ids)
    table = adapted(model, model.text_VX)
    if ids:
        table = table + model.items.weight

    for row in ROWS:
        x = stream(model, table[row])
        expected = F.cosine_similarity(x[:, None], table[None], dim=-1) / 0.07

        batch = make_batch([row])
        torch.testing.assert_close(model(batch)[0] @ model.item_vectors().T, expected, atol=1e-4, rtol=1e-4)


def test_the_gate_is_noisy_in_training_alone():
    model = build()
    assert torch.equal(model.item_vectors(), model.item_vectors())
    model.train()
    assert not torch.allclose(model.item_vectors(), model.item_vectors())


def test_the_contrast_is_a_softmax_over_the_other_targets():
    query, key = torch.randn(4, 8), torch.randn(4, 8)
    target = torch.tensor([5, 6, 5, 7])  # rows 0 and 2 ask for the same item
    score = (query @ key.T).exp()
    others = [[0, 1, 3], [0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3]]

    expected = -sum((score[r, r] / score[r, others[r]].sum()).log() for r in range(4)) / 4

    torch.testing.assert_close(contrast(query, key, target), expected)


def test_pre_training_contrasts_items_and_views():
    model, plain = build(item_drop=0.0, ids=True).train(), build().train()
    for one in (model, plain):
        one.adaptor.eval()  # without noise
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name != "items.weight"})
    model.text_VX.copy_(plain.text_VX)
    model.enter("contrastive")
    batch = make_batch([[3, 7, 2], [5, 1, 4], [8, 9, 6]])
    history, target = make_batch([[3, 7], [5, 1], [8, 9]]), torch.tensor([2, 4, 6])
    query = F.normalize(plain(history)[:, -1], dim=-1)  # ids have no part in it

    terms = model.training_loss(batch, lambda _: pytest.fail("the next item is not a task here"))

    items = contrast(query / 0.07, plain.item_vectors()[target], target)
    views = contrast(query / 0.07, query, target)  # nothing was dropped
    torch.testing.assert_close(terms["items"], items)
    torch.testing.assert_close(terms["sequences"], 0.001 * views)


def test_a_view_keeps_the_order_and_the_oldest_item():
    items = torch.tensor([[0, 0, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6]]).repeat(500, 1)

    view = drop_items(items, 0.5)

    assert view.shape == items.shape
    for before, after in zip(items[:40].tolist(), view[:40].tolist(), strict=True):
        kept = [item for item in after if item]
        assert kept == [item for item in before if item in kept]
        assert after == [0] * (6 - len(kept)) + kept
        assert kept[0] == next(item for item in before if item)
    dropped = 1 - (view != 0).sum() / (items != 0).sum()
    assert dropped == pytest.approx(0.5 * 8 / 10, abs=0.03)


def test_another_catalogue_is_served_from_its_text():
    model = build(ids=True)
    vectors = F.normalize(torch.randn(6, 24), dim=-1)

    model.serve(Catalogue(5, 0, 0, {"vectors": vectors}))

    assert model.item_vectors().shape == model.items.weight.shape == (6, 16)
    assert model.catalogue == (5, 0, model.options.length, {"vectors": vectors})
