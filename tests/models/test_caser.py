import numpy as np
from equations import scrambled
from support import make_batch, make_model


def reference(weights, rows, user, window, width):
    """Equations 4 to 10 for the last event of `rows`, window by window, with loops."""
    image = np.zeros((window, width))
    image[window - len(rows) :] = weights["items.weight"][rows] * np.sqrt(width)
    features = []
    for height in range(1, window + 1):
        kernel, bias = (weights[f"horizontal.{height - 1}.{name}"] for name in ("weight", "bias"))
        for k in range(len(kernel)):
            values = [
                max(0.0, float((image[i : i + height] * kernel[k].T).sum() + bias[k]))
                for i in range(window - height + 1)
            ]
            features.append(max(values))
    for d in range(width):
        features.extend(kernel @ image[:, d] for kernel in weights["vertical.weight"])
    z = np.maximum(0, weights["dense.weight"] @ np.array(features) + weights["dense.bias"])
    query = np.concatenate([z, weights["users.weight"][user]])
    return weights["output.weight"] @ query + weights["bias"]


def test_scores_equal_numpy_with_loops():
    model, weights = scrambled(make_model("caser", window=4, horizontal=3, vertical=2))
    weights["items.weight"][0] = 0
    row = [3, 7, 2, 9, 4, 11]

    scores = (model(make_batch([row], user=2)) @ model.item_vectors().T).detach().numpy()[0]

    for position in range(6):
        past = row[max(0, position - 3) : position + 1]
        expected = reference(weights, past, user=2, window=4, width=16)
        np.testing.assert_allclose(scores[position], expected, atol=1e-9)
