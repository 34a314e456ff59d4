import pytest
import torch
from support import make_batch, make_model

from seqrec.models.ssept import shared


def test_blocks_see_item_and_user_side_by_side_and_their_output_is_matched_with_the_same():
    model = make_model("ssept", d_user=6).eval()
    inputs, states = [], []
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    model.norm.register_forward_hook(lambda *call: states.append(call[2]))

    scores = model(make_batch([[3, 7]], user=5))[0] @ model.item_vectors().T

    joined = torch.cat([model.items.weight, model.users.weight[5].expand(31, -1)], 1)
    torch.testing.assert_close(inputs[0][0], joined[[3, 7]] * 22**0.5 + model.positions[-2:])
    torch.testing.assert_close(scores, states[0][0] @ joined.T)


def test_embeddings_are_shared_with_the_given_probability():
    index = torch.full((100_000,), 7)

    got = shared(index, 10, 0.25)

    # of the replaced three quarters, one in ten is 7 again
    assert (got == 7).float().mean().item() == pytest.approx(0.25 + 0.75 / 10, abs=0.01)
    assert sorted(got.unique().tolist()) == list(range(1, 11))
    assert torch.bincount(got, minlength=11)[1:7].float().div(100_000).tolist() == pytest.approx([0.075] * 6, abs=0.005)
    assert torch.equal(shared(index, 10, 1.0), index)
    assert not shared(torch.zeros_like(index), 10, 0.0).any()  # padding stays padding


def test_replacement_is_for_training_alone():
    model = make_model("ssept", keep_item=0.0, keep_user=0.0, dropout=0.0)
    batch = make_batch([[3, 7, 2, 9, 4]])

    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))
