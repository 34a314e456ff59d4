import math

import pytest
import torch

from seqrec import losses


def plain(query, items, target):
    scores = query @ items.T
    scores[:, 0] = float("-inf")
    return torch.nn.functional.cross_entropy(scores, target, reduction="none")


@pytest.fixture(params=[1, 40, 10_000_000], ids=["row by row", "two rows", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_IN_MEMORY", request.param)


def test_by_hand():
    """Scores 1, 2, 3 for items 1 to 3; padding is no candidate whatever its vector."""
    query, items = torch.tensor([[1.0]]), torch.tensor([[50.0], [1.0], [2.0], [3.0]])

    value = losses.cross_entropy(query, items, torch.tensor([2]))

    assert value.item() == pytest.approx(math.log(math.exp(1) + math.exp(2) + math.exp(3)) - 2, abs=1e-6)


@pytest.mark.parametrize("weight", [torch.ones(7), torch.arange(7.0)], ids=["alike", "different"])
def test_value_and_gradients_equal_plain_cross_entropy(block, weight):
    query, items = torch.randn(7, 5, requires_grad=True), torch.randn(20, 5, requires_grad=True)
    target = torch.randint(1, 20, (7,))

    value, expected = losses.cross_entropy(query, items, target), plain(query, items, target)
    torch.testing.assert_close(value, expected)

    ours = torch.autograd.grad((value * weight).sum(), (query, items))
    theirs = torch.autograd.grad((expected * weight).sum(), (query, items))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert ours[1][0].abs().max() == 0


def test_an_unlikely_target_has_a_finite_value_and_gradient():
    query, items = torch.tensor([[100.0]], requires_grad=True), torch.tensor([[0.0], [9.0], [-9.0]])

    value = losses.cross_entropy(query, items, torch.tensor([2]))
    value.sum().backward()

    assert value.item() == pytest.approx(1800.0)
    assert query.grad.item() == pytest.approx(18.0)


def test_no_target_is_no_loss():
    query, items = torch.empty(0, 5, requires_grad=True), torch.randn(20, 5, requires_grad=True)

    losses.cross_entropy(query, items, torch.empty(0, dtype=torch.int64)).sum().backward()

    assert items.grad.abs().max() == 0


def test_never_more_than_a_block_of_logits(monkeypatch):
    """The largest tensor of a pass over 64 queries and 1,000 items stays under two blocks."""
    monkeypatch.setattr(losses, "LOGITS_IN_MEMORY", 4_000)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    query, items = torch.randn(64, 2, requires_grad=True), torch.randn(1000, 2, requires_grad=True)
    with Sizes():
        losses.cross_entropy(query, items, torch.randint(1, 1000, (64,))).sum().backward()

    assert max(sizes) <= 4_000
