"""HSTU against the formulas of the paper, pair by pair in NumPy."""

import math

import numpy as np
import pytest
import torch
from equations import layer_norm, linear, scrambled, silu
from support import make_batch, make_model

from seqrec.models.layers import time_bucket

YEAR = 31_536_000.0
TIMES = [[-YEAR, -90_000.0, -90_000.0, -1.0, 0.0], [0.0, 0.0, -7200.0, -60.0, 0.0]]


def unit(x, times, weights, name, heads, longest):
    gate, query = np.split(silu(layer_norm(x, eps=1e-6) @ weights[f"{name}.to_gate_and_query.weight"].T), 2, axis=-1)
    key, value = np.split(silu(layer_norm(x, eps=1e-6) @ weights[f"{name}.to_key_and_value.weight"].T), 2, axis=-1)
    width, mixed = x.shape[1] // heads, np.zeros_like(x)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(len(x)):
            for j in range(i + 1):
                score = query[i, part] @ key[j, part] + weights[f"{name}.by_distance"][i - j]
                if times is not None:
                    bucket = int(math.log(max(1.0, times[0][i] - times[1][j])) / 0.301)
                    score += weights[f"{name}.by_time"][bucket]
                mixed[i, part] += silu(score) / longest * value[j, part]
    return x + linear(gate * layer_norm(mixed, eps=1e-6), weights, f"{name}.to_out")


@pytest.mark.parametrize("time", [(), ("relative_time",), ("relative_time", "request_time")])
def test_queries_equal_numpy_for_a_padded_row(time):
    model, weights = scrambled(make_model("hstu", layers=2, heads=2, length=12, **dict.fromkeys(time, True)))
    batch = make_batch([[3, 7, 2, 9, 4], [5, 1, 8]])._replace(times=torch.tensor(TIMES).double())

    got = model(batch)[1, 2:].detach().numpy()

    x = weights["items.weight"][[5, 1, 8]] * 4 + weights["positions"][-3:]  # 4 = sqrt(16)
    for layer in range(2):
        asked = [*TIMES[1][3:], 0.0] if "request_time" in time else TIMES[1][2:]
        x = unit(x, (asked, TIMES[1][2:]) if time else None, weights, f"units.{layer}", heads=2, longest=12)
    expected = layer_norm(x) * weights["norm.weight"] + weights["norm.bias"]
    np.testing.assert_allclose(got, expected, atol=1e-9)


def test_buckets_grow_with_the_logarithm_of_the_seconds():
    bucket = time_bucket(torch.tensor([-1e30, -2 * YEAR, 3600.0, -1.0, 0.0]).double())

    assert bucket.tolist() == [128, int(math.log(2 * YEAR) / 0.301), int(math.log(3600) / 0.301), 0, 0]


def test_times_are_read_only_when_asked():
    assert make_model("hstu").needs == frozenset()
    assert make_model("hstu", relative_time=True).needs == {"times"}
