import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from seqrec.training import losses


@pytest.fixture(params=[1, 10_000_000], ids=["a block as large as the items", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_IN_MEMORY", request.param)


def assert_agree(ours, theirs, weight, *inputs):
    """Compare two values of each target, and the gradients of their weighted sums."""
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad((value * weight).sum(), inputs) for value in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("weight", [torch.ones(7), torch.arange(7.0)], ids=["alike", "different"])
@pytest.mark.parametrize("gone", [[], [[5], [5, 9], [8], [], [9], [8], [8]]], ids=["all items", "unseen items"])
def test_value_and_gradients_are_those_of_a_softmax_over_the_candidates(block, weight, gone):
    """Past items are none: 0 is padding, 21 a mask, which is no item; queries 3 and 4 repeat an item of their past."""
    query, items = torch.randn(7, 5, requires_grad=True), torch.randn(21, 5, requires_grad=True)
    target, seen = torch.tensor([1, 7, 20, 8, 5, 3, 20]), torch.tensor([[0, 5, 9], [8, 21, 8]])
    past = losses.PastItems(seen, torch.tensor([0, 0, 1, 1, 0, 1, 1]), torch.tensor([2, 3, 1, 3, 3, 3, 2]))
    hidden = torch.zeros(7, 21, dtype=torch.bool)
    hidden[:, 0] = True
    for row, some in enumerate(gone):
        hidden[row, some] = True

    value = losses.cross_entropy(query, items, target, past=past if gone else None)

    scores = (query @ items.T).masked_fill(hidden, float("-inf"))
    assert_agree(value, F.cross_entropy(scores, target, reduction="none"), weight, query, items)


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


# items 1 to 4 score 1, 2, 3, -1 for the query 1
SCORES = partial(F.embedding, weight=torch.tensor([[0.0], [1.0], [2.0], [3.0], [-1.0]]))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_a_target_that_is_all_that_was_drawn_costs_nothing():
    query = torch.ones(1, 1, requires_grad=True)
    value = losses.sampled_cross_entropy(query, SCORES, torch.tensor([2]), torch.tensor([2, 2]), torch.zeros(5))

    value.sum().backward()

    assert (value.item(), query.grad.item()) == (0, 0)


@pytest.mark.parametrize("weights", [torch.full((9,), 0.25), torch.linspace(0.1, 2, 9)], ids=["equal", "unequal"])
def test_the_sampled_gradients_equal_those_of_autograd_in_several_blocks(weights, monkeypatch):
    monkeypatch.setattr(losses, "SAMPLED_LOGITS", 30)  # four targets
    query, items = torch.randn(9, 4, requires_grad=True), torch.randn(13, 4, requires_grad=True)
    target, drawn, log_expected = torch.arange(1, 10), torch.tensor([3, 12, 3, 9, 1, 11, 5]), torch.randn(13)

    ours = losses.sampled_cross_entropy(query, partial(F.embedding, weight=items), target, drawn, log_expected)

    score = query @ items[drawn].T - log_expected[drawn]
    score = score.masked_fill(drawn == target.unsqueeze(1), -torch.inf)
    goal = (query * items[target]).sum(1, keepdim=True)
    theirs = F.cross_entropy(torch.cat([goal, score], 1), torch.zeros(9).long(), reduction="none")
    assert_agree(ours, theirs, weights, query, items)


@pytest.mark.parametrize(("t", "beta"), [(0.0, 1.0), (1.0, 2 / 3), (0.5, 2 / 3 * (0.5 * (1 - 1.5) + 1.5))])
def test_gbce_by_hand(t, beta):
    """Two negatives of the three other items: alpha = 2 / 3. The third one is the target itself and does not count."""
    value = losses.binary_cross_entropy(
        torch.ones(1, 1), SCORES, torch.tensor([3]), torch.tensor([[1, 4, 3]]), beta=losses.gbce_beta(t, 2, 4)
    )

    rivals = -math.log(1 - sigmoid(1)) - math.log(1 - sigmoid(-1))
    assert value.item() == pytest.approx(-beta * math.log(sigmoid(3)) + rivals)


def test_bpr_by_hand():
    """The third negative is the target itself and does not count."""
    value = losses.bayesian_personalized_ranking(torch.ones(1, 1), SCORES, torch.tensor([2]), torch.tensor([[1, 3, 2]]))

    assert value.item() == pytest.approx(-(math.log(sigmoid(1)) + math.log(sigmoid(-1))) / 2)


@pytest.mark.parametrize("name", ["sampled_cross_entropy", "binary_cross_entropy", "bayesian_personalized_ranking"])
def test_sparse_gradients_equal_dense_ones_and_hold_the_rows_used(name):
    query, target = torch.randn(3, 4), torch.tensor([1, 5, 5])
    shared = name == "sampled_cross_entropy"
    drawn = torch.tensor([2, 5, 9]) if shared else torch.tensor([[2, 9], [5, 2], [9, 9]])
    extra = (torch.zeros(13),) if shared else ()

    gradients = []
    for sparse in (False, True):
        items = torch.randn(13, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        rows = partial(F.embedding, weight=items, sparse=sparse)
        getattr(losses, name)(query, rows, target, drawn, *extra).sum().backward()
        gradients.append(items.grad)

    torch.testing.assert_close(gradients[1].to_dense(), gradients[0])
    assert set(gradients[1].coalesce().indices()[0].tolist()) == {1, 2, 5, 9}


def test_rounded_products_stay_close_and_leave_the_callers_precision():
    query, items, target = torch.randn(64, 32), torch.randn(500, 32), torch.randint(1, 500, (64,))

    exact, rounded = (losses.cross_entropy(query, items, target, precision=name) for name in ("fp32", "bf16"))

    torch.testing.assert_close(rounded, exact, atol=0.2, rtol=0.02)
    assert torch.get_float32_matmul_precision() == "highest"
