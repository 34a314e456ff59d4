"""The costs of scripts/strec_efficiency.py: fewer rows must need less memory, and the table has every network."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch

efficiency = runpy.run_path(str(Path(__file__).parent.parent / "scripts/strec_efficiency.py"))


def test_networks_with_fewer_rows_allocate_less_and_the_reference_computes_every_row():
    networks, inputs = efficiency["networks"](12), efficiency["histories"](3, 12)
    with torch.inference_mode():
        peaks = {
            name: efficiency["peak_bytes"](efficiency["encoder"](network, inputs)) for name, network in networks.items()
        }

    swept = [peak for name, peak in peaks.items() if name.startswith("STRec, k")]
    assert swept == sorted(swept, reverse=True)
    assert peaks[efficiency["ALL"]] > peaks[efficiency["LAST"]] > swept[-1]
    shares = [efficiency["left_out"](name, network) for name, network in networks.items()]
    assert shares[:3] == ["0.0%", "11.5%", "47.9%"]  # 11/12 of one layer in 8; and 5/12 of the other seven
    assert shares[-3:] == ["-"] * 3


def test_a_served_network_ranks_as_the_network_does():
    network, inputs = efficiency["networks"](12)["STRec, k = 4"], efficiency["histories"](3, 12)

    _, items = efficiency["served"](network, inputs)()

    with torch.inference_mode():
        scores = efficiency["encoder"](network, inputs)() @ network.item_vectors()[1:].T
    torch.testing.assert_close(torch.from_numpy(items), 1 + scores.topk(efficiency["TOP"]).indices)
