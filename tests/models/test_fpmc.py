import pytest
from support import make_batch, make_model


def test_score_is_the_taste_of_the_user_plus_what_follows_the_last_item():
    model = make_model("fpmc").eval()
    taste, following = model.next_items.weight[:, :16], model.next_items.weight[:, 16:]

    scores = model(make_batch([[3, 7, 2]], user=2)) @ model.item_vectors().T

    for position, item in enumerate([3, 7, 2]):
        for candidate in (1, 5, 30):
            by_user = sum((model.users.weight[2, f] * taste[candidate, f]) for f in range(16)).item()
            by_item = sum((model.last_items.weight[item, f] * following[candidate, f]) for f in range(16)).item()
            assert scores[0, position, candidate].item() == pytest.approx(by_user + by_item, abs=1e-7)
