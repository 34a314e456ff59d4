"""The twins of scripts/rec_denoiser_twins.py: shuffled masks, the dropped share, and who is compared with whom."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from seqrec.models.base import Catalogue
from seqrec.models.rec_denoiser import RecDenoiser, RecDenoiserOptions

twins = runpy.run_path(str(Path(__file__).parent.parent / "scripts/rec_denoiser_twins.py"))


@pytest.mark.parametrize(("backbone", "objective"), [("sasrec", "causal"), ("bert4rec", "cloze")])
def test_entries_are_shuffled_among_the_keys_that_their_query_may_read(backbone, objective):
    options = RecDenoiserOptions(length=8, d_model=4, backbone=backbone, objective=objective)
    model = RecDenoiser(options, Catalogue(num_items=9, num_users=1, length=8))
    place = torch.arange(64.0).view(1, 8, 8)
    for mask in model.masks:
        mask.raw_XLL.data.copy_(place)

    twins["shuffle"](model, seed=1)

    first, second = (mask.raw_XLL.detach() for mask in model.masks)
    readable = torch.ones(8, 8, dtype=torch.bool) if objective == "cloze" else torch.ones(8, 8).tril().bool()
    for shuffled in (first, second):
        before, after = (entries.masked_fill(~readable, -1) for entries in (place, shuffled))
        assert torch.equal(after.sort().values, before.sort().values)
        assert torch.equal(shuffled.masked_fill(readable, -1), place.masked_fill(readable, -1))
        assert not torch.equal(shuffled, place)
    assert not torch.equal(first, second)


def test_the_dropped_share_covers_the_entries_that_a_query_may_read():
    options = RecDenoiserOptions(length=3, d_model=4, keep=0.9)
    model = RecDenoiser(options, Catalogue(num_items=9, num_users=1, length=3))
    mask = model.masks[0]
    mask.raw_XLL.data[0, 0, 2] = 100.0  # a key after its query
    assert twins["dropped"](model) == pytest.approx(0.1)
    mask.raw_XLL.data[0, 2, 0] = 100.0  # one of 12 entries is always kept
    assert twins["dropped"](model) == pytest.approx(0.1 * 11 / 12)


def test_rows_are_compared_with_their_backbone():
    first, tenth = (np.full(40, rank, dtype=float) for rank in (1, 10))
    row = twins["Row"]
    rows = {"one": row({1: (tenth, tenth)}), "one-mask": row({1: (first, tenth)}), "two": row({1: (first, first)})}
    lines = {line.split(" | ")[0].strip("| "): line for line in twins["table"](np.arange(40), rows).splitlines()}
    gain = 1 - 1 / np.log2(11)
    assert f"{gain:+.4f} [" in lines["one-mask"]
    assert "+0.0000 [+0.0000, +0.0000], 1.000" in lines["one-mask"]
    assert "[" not in lines["one"] + lines["two"]
