"""eSASRec against the formulas of its blocks in NumPy."""

import numpy as np
import pytest
import torch
from support import make_batch, make_model


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, weights, name):
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}.weight"]
        + weights[f"{name}.bias"]
    )


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def attention(x, weights, name, heads):
    query, key, value = (linear(x, weights, f"{name}.to_{part}") for part in ("query", "key", "value"))
    length, width = len(x), x.shape[1] // heads
    mixed = np.zeros_like(x)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(length):
            scores = np.exp(key[: i + 1, part] @ query[i, part] / np.sqrt(width))
            mixed[i, part] = scores / scores.sum() @ value[: i + 1, part]
    return linear(mixed, weights, f"{name}.to_out")


def block(x, weights, name, heads):
    mixed = attention(norm(x, weights, f"{name}.norm_attention"), weights, f"{name}.attention", heads)
    x = x + sigmoid(linear(x, weights, f"{name}.gate_attention")) * mixed
    inner = linear(norm(x, weights, f"{name}.norm"), weights, f"{name}.inner")
    squashed, plain = np.split(inner, 2, axis=-1)
    outer = linear(squashed * sigmoid(squashed) * plain, weights, f"{name}.outer")
    return x + sigmoid(linear(x, weights, f"{name}.gate")) * outer


def test_scores_equal_numpy_for_a_padded_row():
    model = make_model("esasrec", layers=2, heads=2, expansion=3).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}

    got = model(make_batch([[3, 7, 2, 9, 4], [5, 1, 8]]))[1, 2:].detach().numpy()

    x = weights["items.weight"][[5, 1, 8]] + weights["positions"][-3:]
    for layer in range(2):
        x = block(x, weights, f"blocks.{layer}", heads=2)
    np.testing.assert_allclose(got, norm(x, weights, "norm"), atol=1e-9)


def test_no_expansion_is_an_error():
    with pytest.raises(ValueError, match="expansion"):
        make_model("esasrec", expansion=0)
