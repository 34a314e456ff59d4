import pytest
import torch
from support import make_batch, make_model

from seqrec.training.losses import bayesian_personalized_ranking


def test_score_is_the_inner_product_of_user_and_item_plus_the_items_bias():
    model = make_model("mfbpr").eval()
    torch.nn.init.normal_(model.bias)

    scores = model(make_batch([[3, 7, 2]], user=2)) @ model.item_vectors().T

    for candidate in (1, 5, 30):
        product = sum((model.users.weight[2, f] * model.items.weight[candidate, f]) for f in range(16)).item()
        expected = product + model.bias[candidate].item()
        assert scores[0, :, candidate].tolist() == pytest.approx([expected] * 3, abs=1e-6)


def test_an_unknown_user_is_ranked_by_the_bias_alone():
    model = make_model("mfbpr").eval()
    torch.nn.init.normal_(model.bias)

    scores = model(make_batch([[3, 7]], user=0), last=True)[0, 0] @ model.item_vectors().T

    assert torch.equal(scores, model.bias.data)


def test_the_loss_of_the_paper_puts_each_users_items_first():
    """No position can be told from another, so the user's items are learned as a set."""
    model = make_model("mfbpr").train()
    batch = make_batch([[3, 7, 2, 9, 4], [5, 1, 8, 6, 2]])._replace(user=torch.tensor([1, 2]))
    rivals = torch.arange(1, 31).expand(10, -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for _ in range(150):
        query, items = model(batch).flatten(0, 1), model.item_vectors()
        optimizer.zero_grad()
        bayesian_personalized_ranking(query, items, batch.items.flatten(), rivals).mean().backward()
        optimizer.step()

    best = (model(batch, last=True)[:, 0] @ model.item_vectors().T)[:, 1:].topk(5).indices + 1
    assert [set(row.tolist()) for row in best] == [{3, 7, 2, 9, 4}, {5, 1, 8, 6, 2}]


def test_the_width_must_be_positive():
    with pytest.raises(ValueError, match="d_model"):
        make_model("mfbpr", d_model=0)
