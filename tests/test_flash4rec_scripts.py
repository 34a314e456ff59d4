"""scripts/flash4rec_routing.py: each choice of experts."""

import torch

from scripts import flash4rec_routing as routing


def test_each_choice_replaces_what_its_name_says():
    expert_N1 = torch.tensor([2, 0, 2, 1, 2, 0, 3, 2]).unsqueeze(1)

    chosen = {name: choice(torch.ones(8, 1), expert_N1, 4) for name, choice in routing.CHOICES.items()}

    assert chosen["as trained"][1].equal(expert_N1)
    other = chosen["the expert of another event"][1]
    assert not other.equal(expert_N1)
    assert other.sort(0).values.equal(expert_N1.sort(0).values)
    assert chosen["the busiest expert for all"][1].unique().tolist() == [2]
    assert set(chosen["a random expert"][1].flatten().tolist()) <= {0, 1, 2, 3}
    assert [bool(gate.any()) for gate, _ in chosen.values()] == [True, True, True, True, False]
