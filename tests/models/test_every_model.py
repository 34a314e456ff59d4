"""What the protocol of models/base.py promises, for every architecture."""

import pytest
import torch
from conftest import make_batch, make_model

from models.base import Batch

ROWS = [[3, 7, 2, 9, 4], [5, 1, 8], [6]]


@pytest.fixture
def model(architecture):
    return make_model(architecture[0]).eval()


def test_last_is_the_last_position_of_the_full_pass(model):
    batch = make_batch(ROWS)

    torch.testing.assert_close(model(batch, last=True), model(batch)[:, -1:], atol=1e-6, rtol=1e-5)


def test_future_items_cannot_change_the_past(model):
    batch, changed = make_batch([[3, 7, 2, 9, 4]]), make_batch([[3, 7, 2, 11, 12]])

    before, after = model(batch), model(changed)

    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


def test_every_past_item_matters(model):
    reference = model(make_batch([[3, 7, 2, 9, 4]]), last=True)

    for position in range(5):
        row = [3, 7, 2, 9, 4]
        row[position] = 20
        assert (model(make_batch([row]), last=True) - reference).abs().max() > 1e-7, position


def test_padding_cannot_change_a_query(model):
    alone = model(make_batch([[5, 1, 8]]), last=True)
    padded = model(make_batch(ROWS), last=True)[1:2]

    torch.testing.assert_close(alone, padded, atol=1e-6, rtol=1e-5)


def test_padding_is_no_source_of_nan(model):
    empty = Batch(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))

    assert model(empty).isfinite().all()


def test_one_batch_is_overfitted(architecture):
    model = make_model(architecture[0], dropout=0.0).train()
    batch = make_batch([[3, 7, 2, 9, 4], [5, 1, 8, 6, 2]])
    target = torch.tensor([[7, 2, 9, 4, 1], [1, 8, 6, 2, 3]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def task(query_BLD):
        scores = query_BLD @ model.item_vectors().T
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())[None]

    for _ in range(250):
        optimizer.zero_grad()
        loss = torch.stack(list(model.training_loss(batch, task).values())).sum()
        loss.backward()
        optimizer.step()

    scores = model.eval()(batch) @ model.item_vectors().T
    assert (scores.argmax(-1) == target).all()


def test_every_parameter_is_trained(architecture):
    model = make_model(architecture[0]).train()
    batch = make_batch(ROWS)

    terms = model.training_loss(batch, lambda query: (query @ model.item_vectors().T).logsumexp(-1).mean(-1))
    torch.stack(list(terms.values())).sum().backward()

    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_an_objective_it_cannot_be_trained_with_is_refused(architecture):
    with pytest.raises(ValueError, match="objective"):
        make_model(architecture[0], objective="telepathy")


@pytest.mark.parametrize("options", [{"dropout": 1.0}, {"length": 0}, {"layers": 0}])
def test_options_out_of_range_are_refused(architecture, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make_model(architecture[0], **options)
