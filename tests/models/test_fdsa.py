"""FDSA: its attention over attributes and its two streams, against sums written out and SASRec-like streams."""

from __future__ import annotations

import torch
from equations import stream
from support import add_noise, make_batch, make_model


def build():
    model = make_model("fdsa", dropout=0.0)
    add_noise(model, 0.1)
    return model.eval()


def mixed(model, values):
    """What an item's `values` are together: their embeddings, weighted by a softmax over what there is."""
    part = model.attributes
    vectors = part.values.weight[values]
    score = torch.relu(vectors @ part.inner.weight.T + part.inner.bias) @ part.outer.weight[0]
    return sum(weight * vector for weight, vector in zip(score.softmax(0), vectors, strict=True))


@torch.no_grad()
def test_two_streams_are_joined():
    model = build()
    for row in ([3, 7, 2, 9, 4], [5, 1], [8]):
        of_items = stream(model.of_items, model.items.weight[row])
        attributes = [[value for value in model.value_VM[item].tolist() if value] for item in row]
        of_attributes = stream(model.of_attributes, torch.stack([mixed(model, values) for values in attributes]))
        expected = torch.cat([of_items, of_attributes], -1) @ model.join.weight.T + model.join.bias

        torch.testing.assert_close(model(make_batch([row]))[0], expected, atol=1e-4, rtol=1e-4)
