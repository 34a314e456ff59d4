"""The noise of scripts/rec_denoiser_noise.py: draws of noise on the same test cases, and the table of gains."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import YEAR_2001, write_settings

from seqrec.config import load
from seqrec.data import sequences

noise = runpy.run_path(str(Path(__file__).parent.parent / "scripts/rec_denoiser_noise.py"))


def test_each_draw_has_its_own_noise_and_start_and_is_ranked_on_the_same_cases(tmp_path):
    params = load(write_settings(tmp_path, start=YEAR_2001))
    same = params.models["sasrec"]
    params = replace(params, models=dict.fromkeys(noise["ROWS"], same), leaderboard=noise["ROWS"])

    text = noise["compare"](params, tmp_path, [0.3], [1, 2])

    assert text.count("+0.0000 [+0.0000, +0.0000], 1.000") == 4  # the three rows are the same model
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
    values = {(share, row): base + 0.01 for share in (0.05, 0.1) for row in noise["ROWS"]}
    values |= {(share, "sasrec"): base for share in (0.05, 0.1)}

    lines = noise["table"](np.arange(40), values).splitlines()

    assert lines[2].startswith(
        "| 5% | 0.1000 ± 0.1000 | 0.1100 | +0.0100 [+0.0100, +0.0100], 0.000 | 0.1100 | +0.0100 ["
    )
    assert lines[3].startswith("| 10% |")
    values = {(share, row): base.copy() for share, row in values}
    values[0.1, "sasrec-ste"][:, :6] += 0.1  # 2 of the 64 signs of six users are as far from zero: p = 1 / 32
    of_share, of_all = (line.split(" | ") for line in noise["table"](np.arange(40), values).splitlines()[3:5])
    assert float(of_share[-1].split("], ")[1].rstrip(" |")) == pytest.approx(4 / 32, abs=0.02)
    assert of_all[0] == "| all"
    assert of_all[-1].startswith(f"+{0.1 * 6 / 40 / 2:.4f} [")  # six users, half of the draws
    assert float(of_all[-1].split("], ")[1].rstrip(" |")) == pytest.approx(2 / 32, abs=0.02)
