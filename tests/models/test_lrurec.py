"""LRURec against its recurrence, computed step by step with complex numbers in NumPy."""

import math

import numpy as np
import pytest
import torch
from support import make_batch, make_model

from seqrec.models.lrurec import LinearRecurrentUnit


def coefficients(weights, name):
    size = np.exp(-np.exp(weights[f"{name}.log_decay"]))
    return size * np.exp(1j * np.exp(weights[f"{name}.log_angle"]))


def norm(x, weights, name):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def unit(inputs, weights, name):
    """States one after the other, then the real part of a complex product."""
    coefficient = coefficients(weights, name)
    real, imaginary = np.split(linear(inputs, weights, f"{name}.to_state"), 2, axis=-1)
    state, states = 0, []
    for x in (real + 1j * imaginary) * np.exp(weights[f"{name}.log_gamma"]):
        state = coefficient * state + x
        states.append(state)
    by_real, by_imaginary = np.split(weights[f"{name}.to_out.weight"], 2, axis=1)
    return (np.array(states) @ (by_real - 1j * by_imaginary).T).real + weights[f"{name}.to_out.bias"]


def test_queries_equal_the_recurrence_for_a_padded_row():
    model = make_model("lrurec", layers=2, length=13).double().eval()
    for name, parameter in model.named_parameters():
        if ".log_" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    row = [3, 7, 2, 9, 4, 8, 8, 1, 20, 5, 6]

    got = model(make_batch([[1] * 13, row]))[1, 2:].detach().numpy()

    x = norm(weights["items.weight"][row], weights, "norm")
    for layer in range(2):
        name = f"blocks.{layer}"
        x = norm(x + unit(x, weights, f"{name}.unit"), weights, f"{name}.norm_unit")
        inner = torch.nn.functional.gelu(torch.from_numpy(linear(x, weights, f"{name}.inner"))).numpy()
        x = norm(x + linear(inner, weights, f"{name}.outer"), weights, f"{name}.norm")
    np.testing.assert_allclose(got, x, atol=1e-9)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 50])
def test_the_scan_equals_one_step_after_the_other(length):
    part = LinearRecurrentUnit(3, length).double()
    weights = {f"unit.{name}": value.detach().numpy() for name, value in part.named_parameters()}
    inputs = torch.randn(2, length, 12).double()

    real, imaginary = part.scan(*inputs.chunk(2, dim=-1))

    coefficient, state = coefficients(weights, "unit"), np.zeros((2, 6), dtype=complex)
    for t in range(length):
        state = coefficient * state + (inputs[:, t, :6] + 1j * inputs[:, t, 6:]).numpy()
        np.testing.assert_allclose((real[:, t] + 1j * imaginary[:, t]).detach().numpy(), state, atol=1e-10)


def test_states_start_on_the_ring_and_as_large_as_their_input():
    part = LinearRecurrentUnit(2000, 50)
    radius, angle = (-part.log_decay.exp()).exp(), part.log_angle.exp()

    assert 0.8 <= radius.min() < 0.801
    assert 0.989 < radius.max() <= 0.99
    torch.testing.assert_close(radius.square().mean(), torch.tensor((0.8**2 + 0.99**2) / 2), atol=0.01, rtol=0)
    assert angle.min() < 0.1
    assert 2 * math.pi - 0.1 < angle.max() <= 2 * math.pi + 1e-5
    weight = part.log_gamma.exp() * radius ** torch.arange(2000).unsqueeze(1)  # of an input, so many steps later
    torch.testing.assert_close(weight.square().sum(0), torch.ones(4000), atol=1e-4, rtol=0)
