"""Item vectors that also read the words of the items' text."""

import pytest
import torch
from support import make_batch, make_model

MODELS = ("esasrec", "flash4rec", "gru4rec", "sasrec")


@pytest.mark.parametrize(("name", "objective"), [*((name, "causal") for name in MODELS), ("flash4rec", "cloze")])
def test_an_items_vector_is_its_own_plus_its_words_over_the_root_of_their_number(name, objective):
    model = make_model(name, attribute_values=3, objective=objective).eval()
    value_VM = model.words.value_VM
    value_VM[4], value_VM[5] = torch.tensor([7, 2, 9]), 0  # item 5 has no words

    model.on_start(torch.tensor([0, 1, 1, 1, 30, 90, *[5] * 25]))

    vectors = model.item_vectors()

    own, word = model.items.weight, model.words.vectors.weight
    torch.testing.assert_close(vectors[4], 0.75 * own[4] + (word[7] + word[2] + word[9]) / 3**0.5)
    torch.testing.assert_close(vectors[[0, 5]], own[[0, 5]])
    if model.options.masked:
        torch.testing.assert_close(model.embed(torch.tensor(31)), own[31])  # MASK
    some = torch.tensor([[4, 1], [4, 0]])
    torch.testing.assert_close(model.vectors_of(some), vectors[some])
    moved = model(make_batch([[3, 4]]))[0, -1, 0] + model.item_vectors()[4].sum()
    gradient = torch.autograd.grad(moved, word)[0]
    assert set(gradient.any(1).nonzero().flatten().tolist()) == {7, 2, 9, *value_VM[3][value_VM[3] > 0].tolist()}
