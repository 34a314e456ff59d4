"""BSARec against its formulas in NumPy, and what its training may read."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from equations import attention, gelu, layer_norm, linear, scrambled
from support import draw_windows, make_batch, make_model

from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.models.bsarec import low_pass
from seqrec.training import objectives
from seqrec.training.batches import Windows


@pytest.mark.parametrize(("length", "cut"), [(8, 1), (8, 5), (7, 4), (7, 7), (1, 1)])
def test_the_filter_is_that_of_the_fourier_transform(length, cut):
    x = torch.randn(length, 3)

    spectrum = np.fft.fft(x.double().numpy(), axis=0)  # frequency f and length - f are one wave
    spectrum[[f for f in range(length) if min(f, length - f) > cut // 2]] = 0

    np.testing.assert_allclose(low_pass(length, cut) @ x, np.fft.ifft(spectrum, axis=0).real, atol=1e-5)


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


def test_queries_equal_numpy_for_a_padded_row():
    model, weights = scrambled(make_model("bsarec", layers=2, heads=1, length=7, alpha=0.6, cut=3))

    got = model(make_batch([[3, 7, 2, 9, 4], [5, 1, 8]]))[1].detach().numpy()

    x = layer_norm(weights["items.weight"][[0, 0, 0, 0, 5, 1, 8]] + weights["positions"], weights, "norm", eps=1e-12)
    for layer in range(2):
        x = block(x, weights, f"blocks.{layer}", alpha=0.6, kept=2, first=4)
    np.testing.assert_allclose(got, x[-5:], atol=1e-6)  # the filter is rounded to float32


def test_training_reads_nothing_after_its_targets(prepared):
    """Rows but the last one know later events; the loss reads the last one, of a window that ends before its target."""
    data = sequences.load(prepared)
    model = make_model("bsarec", num_items=data.num_items).eval()
    options, windows = draw_windows(data, length=12, objective="last")
    windows = Windows(*(x[windows.user == 3] for x in windows))
    cut = int(data.start[3]) + 6  # the events from here on become others
    later = data.items.clone()
    later[cut:] = later[cut:] % data.num_items + 1
    queries = []

    for seen in (data, replace(data, items=later)):
        example = objectives.example(seen, options, FinetuneConfig(), windows, seed=0)
        model.training_loss(example.batch, lambda query: queries.append(query) or query.sum(-1))
        assert (example.target_BL[:, :-1] == 0).all()
    before, after = queries

    assert before.shape == (len(windows.user), 1, 16)
    same = (before == after).flatten(1).all(1)
    assert torch.equal(same, windows.stop - 1 <= cut)  # the target is the window's last event
    assert 3 < int(same.sum()) < len(same) - 3
    whole = model(make_batch([[3, 7, 2, 9, 4]])), model(make_batch([[3, 7, 2, 9, 5]]))
    assert (whole[0] != whole[1]).any(2).all()
