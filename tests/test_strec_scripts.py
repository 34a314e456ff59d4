"""scripts/strec_oracle.py: events that it names, computed alone; benchmarks/strec_efficiency.py: memory and lists."""

from __future__ import annotations

import pytest
import torch
from support import make_batch, make_model

from benchmarks import meter, strec_efficiency
from scripts import strec_oracle as oracle
from seqrec.models.strec import STRec


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(3)
    model = make_model("strec", num_items=9, length=6, d_model=8, layers=3, sampling="none").eval()
    for weight in model.parameters():  # far from the start, where attention is uniform
        torch.nn.init.normal_(weight, std=0.7)
    return model


@pytest.fixture
def batch():
    return make_batch([[1, 5, 2, 9, 3, 4], [7, 2, 8, 1]])


def test_rollout_is_the_product_of_the_layers(dense, batch):
    reached = torch.eye(6).repeat(2, 1, 1)
    x = dense._embedded(batch.items)
    for block in dense.blocks:
        query, key = (
            (x @ weight.T + shift).view(2, 6, 2, 4).transpose(1, 2)
            for weight, shift in (
                (block.attention.project.weight[:8], block.attention.project.bias[:8]),
                (
                    block.attention.project.weight[8:].view(2, 2, 4, 8)[:, 0].reshape(8, 8),
                    block.attention.project.bias[8:].view(2, 2, 4)[:, 0].reshape(8),
                ),
            )
        )
        logits = (query @ key.mT / 2).masked_fill((batch.items == 0)[:, None, None], -torch.inf)
        reached = 0.5 * (logits.softmax(-1).mean(1) + torch.eye(6)) @ reached
        x = block.transform(block.attend(x, slice(None), (batch.items != 0)[:, None, None]))

    found = oracle.by_rollout(dense, batch)

    torch.testing.assert_close(found, reached[:, -1])
    assert found[1, :2].tolist() == [0, 0]


def test_the_gradient_is_the_change_of_the_best_scores_as_an_event_fades(dense, batch):
    def best(scale_BL):
        x = dense._embedded(batch.items) * scale_BL.unsqueeze(-1)
        for block in dense.blocks:
            x = block.transform(block.attend(x, slice(None), (batch.items != 0)[:, None, None]))
        return (x[:, -1] @ dense.items.weight[1:].T).sum(-1)  # of nine items, all are among the best ten

    step = 1e-3
    with torch.no_grad():
        changes = [
            (best(1 + step * torch.eye(6)[place]) - best(1 - step * torch.eye(6)[place])) / (2 * step)
            for place in range(6)
        ]

    found = oracle.by_gradient(dense, batch)

    torch.testing.assert_close(found, torch.stack(changes, 1).abs(), atol=3e-3, rtol=0.02)
    assert found[0].max() > 0.02
    assert found[1, :2].tolist() == [0, 0]


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("choice", ["oracle: attention rollout", "oldest"])
def test_with_a_row_for_every_event_the_dense_network_is_computed(dense, batch, choice, keys):
    ours = oracle.Chosen(dense, oracle.CHOICES[choice], 6, keys)
    torch.testing.assert_close(ours(batch, last=True), dense(batch, last=True))


def test_hidden_events_change_nothing_and_events_without_a_row_are_still_read(dense, batch):
    changed = batch._replace(items=batch.items.clone())
    changed.items[0, 0] = 6  # the oldest of six events
    for keys, same in ((True, True), (False, False)):
        model = oracle.Chosen(dense, oracle.by_recency, 3, keys)
        before, after = model(batch, last=True), model(changed, last=True)
        assert torch.equal(before[0], after[0]) == same
        assert torch.equal(before[1], after[1])


def test_the_most_recent_events_are_those_that_a_sampler_by_position_keeps(dense, batch):
    ours = oracle.Chosen(dense, oracle.by_recency, 3, False)
    theirs = STRec(ours.options, dense.catalogue).eval()
    theirs.load_state_dict({**theirs.state_dict(), **dense.state_dict()})
    torch.testing.assert_close(ours(batch, last=True), theirs(batch, last=True))


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
    network = make_model("strec", num_items=strec_efficiency.ITEMS, k=(4, 1)).eval()
    inputs = strec_efficiency.histories(3, 12)

    _, items = strec_efficiency.served(network, inputs)()

    with torch.inference_mode():
        scores = strec_efficiency.encoder(network, inputs)() @ network.item_vectors()[1:].T
    torch.testing.assert_close(torch.from_numpy(items), 1 + scores.topk(strec_efficiency.TOP).indices)
