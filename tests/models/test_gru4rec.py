"""GRU4Rec against the equations of the gated recurrent unit."""

import numpy as np
import pytest
import torch
from equations import scrambled, sigmoid
from support import make_batch, make_model


def gru(weights, prefix, inputs):
    """States of one layer (Cho et al. 2014), step by step."""
    w, u, b, c = (weights[f"{prefix}.{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    width = len(b) // 3
    reset, update, new = slice(0, width), slice(width, 2 * width), slice(2 * width, None)
    state, states = np.zeros(width), []
    for x in inputs:
        r = sigmoid(w[reset] @ x + b[reset] + u[reset] @ state + c[reset])
        z = sigmoid(w[update] @ x + b[update] + u[update] @ state + c[update])
        n = np.tanh(w[new] @ x + b[new] + r * (u[new] @ state + c[new]))
        state = (1 - z) * n + z * state
        states.append(state)
    return np.array(states)


@pytest.mark.parametrize(("layers", "item_bias"), [(1, False), (2, True)])
def test_scores_equal_numpy_for_a_padded_row(layers, item_bias):
    model, weights = scrambled(make_model("gru4rec", d_state=10, layers=layers, item_bias=item_bias))
    batch = make_batch([[3, 7, 2, 9, 4], [5, 1, 8]])
    scores = (model(batch) @ model.item_vectors().T).detach().numpy()

    states = weights["items.weight"][[5, 1, 8]] * 4  # sqrt(16)
    for layer in range(layers):
        states = gru(weights, f"layers.{layer}", states)
    query = states @ weights["to_query.weight"].T + weights["to_query.bias"]
    expected = query @ weights["items.weight"].T + (weights["bias"] if item_bias else 0)
    np.testing.assert_allclose(scores[1, 2:], expected, atol=1e-10)


def test_beside_words_an_items_vector_ends_with_its_bias():
    model, weights = scrambled(make_model("gru4rec", attribute_values=3, item_bias=True))
    model.on_start(torch.full((31,), 5))
    some = torch.tensor([[4, 1], [4, 0]])

    found = model.vectors_of(some)

    torch.testing.assert_close(found[..., :-1], model.embed(some))
    np.testing.assert_array_equal(found[..., -1].detach().numpy(), weights["bias"][some])
    torch.testing.assert_close(found, model.item_vectors()[some])
