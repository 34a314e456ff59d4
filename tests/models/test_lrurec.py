"""LRURec against its recurrence, computed step by step with complex numbers in NumPy."""

import math

import numpy as np
import pytest
import torch
from equations import gelu, layer_norm, linear, scrambled
from support import make_batch, make_model

from seqrec.models.lrurec import LinearRecurrentUnit


def unit(inputs, weights, name):
    """States one after the other, then the real part of a complex product."""
    size = np.exp(-np.exp(weights[f"{name}.log_decay"]))
    coefficient = size * np.exp(1j * np.exp(weights[f"{name}.log_angle"]))
    real, imaginary = np.split(linear(inputs, weights, f"{name}.to_state"), 2, axis=-1)
    state, states = 0, []
    for x in (real + 1j * imaginary) * np.exp(weights[f"{name}.log_gamma"]):
        state = coefficient * state + x
        states.append(state)
    by_real, by_imaginary = np.split(weights[f"{name}.to_out.weight"], 2, axis=1)
    return (np.array(states) @ (by_real - 1j * by_imaginary).T).real + weights[f"{name}.to_out.bias"]


@pytest.mark.parametrize("length", [3, 8, 9, 13])  # the scan doubles its reach
def test_queries_equal_the_recurrence_for_a_padded_row(length):
    model, weights = scrambled(make_model("lrurec", layers=2, length=length))
    row = [3, 7, 2, 9, 4, 8, 8, 1, 20, 5, 6][: length - 1]

    got = model(make_batch([[1] * length, row]))[1, -len(row) :].detach().numpy()

    x = layer_norm(weights["items.weight"][row], weights, "norm")
    for layer in range(2):
        name = f"blocks.{layer}"
        x = layer_norm(x + unit(x, weights, f"{name}.unit"), weights, f"{name}.norm_unit")
        inner = gelu(linear(x, weights, f"{name}.inner"))
        x = layer_norm(x + linear(inner, weights, f"{name}.outer"), weights, f"{name}.norm")
    np.testing.assert_allclose(got, x, atol=1e-9)


def test_states_start_on_the_ring_and_as_large_as_their_input():
    part = LinearRecurrentUnit(1000, 50)
    radius, angle = (-part.log_decay.exp()).exp(), part.log_angle.exp()

    assert 0.8 <= radius.min() < 0.801
    assert 0.989 < radius.max() <= 0.99
    torch.testing.assert_close(radius.square().mean(), torch.tensor((0.8**2 + 0.99**2) / 2), atol=0.01, rtol=0)
    assert angle.min() < 0.1
    assert 2 * math.pi - 0.1 < angle.max() <= 2 * math.pi + 1e-5
    weight = part.log_gamma.exp() * radius ** torch.arange(2000).unsqueeze(1)  # of an input, so many steps later
    torch.testing.assert_close(weight.square().sum(0), torch.ones(2000), atol=1e-4, rtol=0)
