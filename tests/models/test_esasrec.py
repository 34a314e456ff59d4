"""eSASRec against the formulas of its blocks in NumPy."""

import numpy as np
from equations import attention, layer_norm, linear, scrambled, sigmoid, silu
from support import make_batch, make_model


def block(x, weights, name):
    mixed = attention(layer_norm(x, weights, f"{name}.norm_attention"), weights, f"{name}.attention", heads=2)
    x = x + sigmoid(linear(x, weights, f"{name}.gate_attention")) * mixed
    inner = linear(layer_norm(x, weights, f"{name}.norm"), weights, f"{name}.inner")
    squashed, plain = np.split(inner, 2, axis=-1)
    outer = linear(silu(squashed) * plain, weights, f"{name}.outer")
    return x + sigmoid(linear(x, weights, f"{name}.gate")) * outer


def test_queries_equal_numpy_for_a_padded_row():
    model, weights = scrambled(make_model("esasrec", layers=2, heads=2, expansion=3))

    got = model(make_batch([[3, 7, 2, 9, 4], [5, 1, 8]]))[1, 2:].detach().numpy()

    x = weights["items.weight"][[5, 1, 8]] + weights["positions"][-3:]
    for layer in range(2):
        x = block(x, weights, f"blocks.{layer}")
    np.testing.assert_allclose(got, layer_norm(x, weights, "norm"), atol=1e-9)
