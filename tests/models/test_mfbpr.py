import pytest
import torch
from support import make_batch, make_model


def test_score_is_the_inner_product_of_user_and_item_plus_the_items_bias():
    model = make_model("mfbpr").eval()
    torch.nn.init.normal_(model.bias)

    scores = model(make_batch([[3, 7, 2]], user=2)) @ model.item_vectors().T

    for candidate in (1, 5, 30):
        product = sum((model.users.weight[2, f] * model.items.weight[candidate, f]) for f in range(16)).item()
        expected = product + model.bias[candidate].item()
        assert scores[0, :, candidate].tolist() == pytest.approx([expected] * 3, abs=1e-6)
