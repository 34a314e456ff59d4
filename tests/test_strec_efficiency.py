"""The costs of benchmarks/strec_efficiency.py: fewer rows must need less memory, and a graph ranks as its network."""

from __future__ import annotations

import torch

from benchmarks import meter, strec_efficiency


def test_networks_with_fewer_rows_allocate_less_and_the_reference_computes_every_row():
    networks, inputs = strec_efficiency.networks(12), strec_efficiency.histories(3, 12)
    with torch.inference_mode():
        peaks = {
            name: meter.peak_bytes(strec_efficiency.encoder(network, inputs)) for name, network in networks.items()
        }

    swept = [peak for name, peak in peaks.items() if name.startswith("STRec, k")]
    assert swept == sorted(swept, reverse=True)
    assert peaks[strec_efficiency.ALL] > peaks[strec_efficiency.LAST] > swept[-1]
    shares = [strec_efficiency.left_out(name, network) for name, network in networks.items()]
    assert shares[:3] == ["0.0%", "11.5%", "47.9%"]  # 11/12 of one layer in 8; and 5/12 of the other seven
    assert shares[-3:] == ["-"] * 3


def test_a_served_network_ranks_as_the_network_does():
    network, inputs = strec_efficiency.networks(12)["STRec, k = 4"], strec_efficiency.histories(3, 12)

    _, items = strec_efficiency.served(network, inputs)()

    with torch.inference_mode():
        scores = strec_efficiency.encoder(network, inputs)() @ network.item_vectors()[1:].T
    torch.testing.assert_close(torch.from_numpy(items), 1 + scores.topk(strec_efficiency.TOP).indices)
