"""BSARec against its formulas in NumPy."""

import numpy as np
import pytest
from equations import attention, gelu, layer_norm, linear, scrambled
from support import make_batch, make_model


def block(x, weights, name, alpha, kept, first):
    """Rows before `first` are padding: they read every row, and only they read them."""

    def norm(x, part):
        return layer_norm(x, weights, f"{name}.{part}", eps=1e-12)

    spectrum = np.fft.rfft(x, axis=0)
    spectrum[kept:] = 0
    slow = np.fft.irfft(spectrum, n=len(x), axis=0)
    filtered = norm(x + slow + weights[f"{name}.root_beta"] ** 2 * (x - slow), "norm_filter")
    mixed = attention(x, weights, f"{name}.attention", 1, lambda i: slice(first, i + 1) if i >= first else slice(None))
    x = alpha * filtered + (1 - alpha) * norm(x + mixed, "norm_attention")
    return norm(x + linear(gelu(linear(x, weights, f"{name}.inner")), weights, f"{name}.outer"), "norm")


@pytest.mark.parametrize(("length", "cut"), [(7, 3), (7, 7), (8, 1), (8, 4)])
def test_queries_equal_numpy_for_a_padded_row(length, cut):
    model, weights = scrambled(make_model("bsarec", layers=2, heads=1, length=length, alpha=0.6, cut=cut))

    got = model(make_batch([[3, 7, 2, 9, 4], [5, 1, 8]]))[1].detach().numpy()

    first = length - 3
    x = weights["items.weight"][[0] * first + [5, 1, 8]] + weights["positions"]
    x = layer_norm(x, weights, "norm", eps=1e-12)
    for layer in range(2):
        x = block(x, weights, f"blocks.{layer}", alpha=0.6, kept=cut // 2 + 1, first=first)
    np.testing.assert_allclose(got, x[-5:], atol=1e-6)  # the filter is rounded to float32
