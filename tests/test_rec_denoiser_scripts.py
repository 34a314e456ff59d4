"""scripts/rec_denoiser_noise.py: noise on the same test cases, and gains; rec_denoiser_twins.py: masks compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import YEAR_2001, make_model, write_settings

from scripts import rec_denoiser_noise as noise
from scripts import rec_denoiser_twins as twins
from seqrec.config import load
from seqrec.data import sequences


def test_each_draw_has_its_own_noise_and_start_and_is_ranked_on_the_same_cases(tmp_path):
    params = load(write_settings(tmp_path, start=YEAR_2001))
    same = params.models["sasrec"]
    rows = noise.ROWS[:2]
    params = replace(params, models=dict.fromkeys(rows, same), leaderboard=rows)

    text = noise.compare(params, tmp_path, [0.3], [1, 2], rows)

    assert text.count("+0.0000 [+0.0000, +0.0000], 1.000") == 2  # both rows are the same model
    folders = [tmp_path / f"noise-0.30/seed-{seed}" for seed in (1, 2)]
    data = [sequences.load(folder / "data/sequences") for folder in folders]
    assert [one.card["noise_share"] for one in data] == [0.3, 0.3]
    assert all(one.card["split_sha256"][:12] in text for one in data)
    assert data[0].items.tolist() != data[1].items.tolist()
    first, second = (folder / "artifacts/sasrec/initial/best.safetensors" for folder in folders)
    assert first.read_bytes() != second.read_bytes()


def test_gains_are_paired_and_corrected_for_the_number_of_all_cells():
    generator = np.random.default_rng(0)
    base = generator.random((3, 40))
    base += np.array([[0.0], [0.1], [0.2]]) - base.mean(1, keepdims=True)  # the means of the draws
    values = {(share, row): base + 0.01 for share in (0.05, 0.1) for row in noise.ROWS}
    values |= {(share, "sasrec"): base for share in (0.05, 0.1)}

    lines = noise.table(np.arange(40), values).splitlines()

    assert lines[2].startswith(
        "| 5% | 0.1000 ± 0.1000 | 0.1100 | +0.0100 [+0.0100, +0.0100], 0.000 | 0.1100 | +0.0100 ["
    )
    assert lines[3].startswith("| 10% |")
    values = {(share, row): base.copy() for share, row in values}
    values[0.1, "sasrec-ste"][:, :6] += 0.1  # 2 of the 64 signs of six users are as far from zero: p = 1 / 32
    of_share, of_all = (line.split(" | ") for line in noise.table(np.arange(40), values).splitlines()[3:5])
    assert float(of_share[-1].split("], ")[1].rstrip(" |")) == pytest.approx(4 / 32, abs=0.02)
    assert of_all[0] == "| all"
    assert of_all[-1].startswith(f"+{0.1 * 6 / 40 / 2:.4f} [")  # six users, half of the draws
    assert float(of_all[-1].split("], ")[1].rstrip(" |")) == pytest.approx(2 / 32, abs=0.02)


@pytest.mark.parametrize(("backbone", "objective"), [("sasrec", "causal"), ("bert4rec", "cloze")])
def test_entries_are_shuffled_among_the_keys_that_their_query_may_read(backbone, objective):
    model = make_model("rec_denoiser", length=8, backbone=backbone, objective=objective)
    place = torch.arange(64.0).view(1, 8, 8)
    for mask in model.masks:
        mask.raw_XLL.data.copy_(place)

    twins.shuffle(model, seed=1)

    first, second = (mask.raw_XLL.detach() for mask in model.masks)
    readable = torch.ones(8, 8, dtype=torch.bool) if objective == "cloze" else torch.ones(8, 8).tril().bool()
    for shuffled in (first, second):
        before, after = (entries.masked_fill(~readable, -1) for entries in (place, shuffled))
        assert torch.equal(after.sort().values, before.sort().values)
        assert torch.equal(shuffled.masked_fill(readable, -1), place.masked_fill(readable, -1))
        assert not torch.equal(shuffled, place)
    assert not torch.equal(first, second)


def test_the_dropped_share_covers_the_entries_that_a_query_may_read():
    model = make_model("rec_denoiser", length=3, keep=0.9)
    mask = model.masks[0]
    mask.raw_XLL.data[0, 0, 2] = 100.0  # a key after its query
    assert twins.dropped(model) == pytest.approx(0.1)
    mask.raw_XLL.data[0, 2, 0] = 100.0  # one of 12 entries is always kept
    assert twins.dropped(model) == pytest.approx(0.1 * 11 / 12)


def test_rows_are_compared_with_their_backbone():
    first, tenth = (np.full(40, rank, dtype=float) for rank in (1, 10))
    row = twins.Row
    rows = {"one": row({1: (tenth, tenth)}), "one-mask": row({1: (first, tenth)}), "two": row({1: (first, first)})}
    lines = {line.split(" | ")[0].strip("| "): line for line in twins.table(np.arange(40), rows).splitlines()}
    gain = 1 - 1 / np.log2(11)
    assert f"{gain:+.4f} [" in lines["one-mask"]
    assert "+0.0000 [+0.0000, +0.0000], 1.000" in lines["one-mask"]
    assert "[" not in lines["one"] + lines["two"]
