"""Rec-Denoiser: estimators against all masks, the penalty against the exact Jacobian, the plug-in against backbones."""

import itertools
import math

import numpy as np
import pytest
import torch
from support import make_batch, make_model
from torch import distributed

from seqrec.models import rec_denoiser
from seqrec.models.base import Batch
from seqrec.models.layers import MultiHeadAttention, attention_bias
from seqrec.models.rec_denoiser import BACKBONES, Entmax15, RecDenoiserOptions, StridedSoftmax, recorded
from seqrec.training.optimizer import clip_gradients

ROW = [3, 7, 2]
PLAIN = {"attention": "full", "l0": 0.0, "jacobian": 0.0}


def build(backbone="sasrec", **options):
    options = {"backbone": backbone, "objective": "cloze" if backbone == "bert4rec" else "causal"} | options
    return make_model("rec_denoiser", **options)


def scramble(model, scale=0.15):
    """Give every mask entry a probability of its own, on both sides of one half."""
    for mask in model.masks:
        torch.nn.init.normal_(mask.raw_XLL, mean=-0.1, std=scale)


def example_loss(model, weight_B=None):
    """A task: the log-sum-exp of the scores, at each position weighted by its number."""

    def task(query_BLD):
        value_BL = (query_BLD @ model.item_vectors().T).logsumexp(-1) * torch.arange(1, query_BLD.shape[1] + 1)
        return value_BL if weight_B is None else value_BL * weight_B.unsqueeze(1)

    return task


def total(terms):
    return torch.stack(list(terms.values())).sum()


# Estimators. A mask of n = 3 has six valid entries: 64 masks, each an example of one batch.


@pytest.fixture
def tiny():
    """One layer, three events, double precision, unequal probabilities, a loss that the mask moves a lot."""
    model = build(layers=1, heads=1, d_model=4, length=3, l0=0.0, jacobian=0.0, dropout=0.0).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    torch.nn.init.normal_(model.masks[0].raw_XLL, mean=-0.2, std=0.1)
    return model


def with_settings(model, **options):
    model.options = rec_denoiser.RecDenoiserOptions(**(vars(model.options) | options))
    return model


def enumerated(model, cells):
    """Return every combination of `cells` over the valid entries as (N, 1, 3, 3) positions, and zeros elsewhere."""
    rows, columns = np.tril_indices(3)
    combinations = list(itertools.product(range(cells), repeat=6))
    index = torch.zeros(len(combinations), 1, 3, 3, dtype=torch.int64)
    index[:, 0, rows, columns] = torch.tensor(combinations)
    return index


def over_valid(value_N1LL):
    rows, columns = np.tril_indices(3)
    return value_N1LL[:, 0, rows, columns]


def exact_gradient(model):
    """The gradient of sum_Z p(Z) loss(Z), over all 64 masks."""
    mask, z = model.masks[0], enumerated(model, 2).double()
    phi = mask.logits(3).detach().requires_grad_()
    keep = phi.sigmoid()
    probability = over_valid(torch.where(z > 0, keep, 1 - keep)).prod(1)
    mask.drawn_BXLL = z
    with torch.no_grad():
        loss = example_loss(model)(model(make_batch([ROW] * len(z)))).sum(1)
    mask.drawn_BXLL = None
    (probability * loss).sum().backward()
    return phi.grad.tril()


def estimate(model, uniform, probability):
    """The mean of the estimator over examples that draw `uniform` with `probability`; the gradient in Phi."""
    model._uniform = lambda *_: [uniform]
    total(model.training_loss(make_batch([ROW] * len(uniform)), example_loss(model, probability))).backward()
    return model.masks[0].raw_XLL.grad / model.options.mask_rate


def cell_draws(model, edges):
    """Draws in the middle of each cell between `edges` of [0, 1], entry by entry, and the probability of each.

    Losses are constant in a cell and estimators linear in U: the middle gives the cell's mean exactly.
    """
    index = enumerated(model, len(edges) - 1)
    edges_E3 = torch.stack([edge.squeeze(0) for edge in edges])
    low, high = (torch.gather(edges_E3.expand(len(index), -1, 3, 3), 1, index + i) for i in (0, 1))
    return (low + high) / 2, over_valid(high - low).prod(1)


def bounds(model):
    keep = model.masks[0].logits(3).sigmoid().detach()
    return torch.zeros_like(keep), keep, torch.ones_like(keep)


@pytest.mark.parametrize("credit", ["position", "example"])
@pytest.mark.parametrize("estimator", ["ar", "reinforce", "arm"])
def test_estimators_are_unbiased_over_all_masks(tiny, estimator, credit):
    model = with_settings(tiny, estimator=estimator, credit=credit)
    exact = exact_gradient(model)
    edges = low, keep, high = bounds(model)
    if estimator == "arm":  # which looks at a mask and at its opposite
        edges = (low, torch.minimum(keep, 1 - keep), torch.maximum(keep, 1 - keep), high)
    uniform, probability = cell_draws(model, edges)
    assert probability.sum().item() == pytest.approx(1)

    got = estimate(model, uniform, probability)

    assert over_valid(exact[None]).abs().min() > 1e-4
    torch.testing.assert_close(got, exact)


def test_one_draw_for_a_batch_is_unbiased_as_well(tiny):
    """Two examples share each of the 64 masks: the gradient of the mean of their summed losses."""
    model, batch = with_settings(tiny, estimator="ar", draws="batch"), make_batch([ROW, [5, 9, 1]])
    mask = model.masks[0]
    uniform, probability = cell_draws(model, bounds(model))
    z = (uniform < bounds(model)[1]).double()

    phi = mask.logits(3).detach().requires_grad_()
    chance = over_valid(torch.where(z > 0, phi.sigmoid(), 1 - phi.sigmoid())).prod(1)
    losses = []
    for i in range(len(z)):
        mask.drawn_BXLL = z[i : i + 1]
        losses.append(example_loss(model)(model(batch)).sum().detach())
    (chance * torch.stack(losses)).sum().backward()

    for i, p in enumerate(probability):
        model._uniform = lambda *_, i=i: [uniform[i : i + 1]]
        (p * total(model.training_loss(batch, example_loss(model)))).backward()
    torch.testing.assert_close(mask.raw_XLL.grad / model.options.mask_rate, phi.grad.tril())


@pytest.mark.parametrize("backbone", ["sasrec", "bert4rec"])
@pytest.mark.parametrize("credit", ["position", "example"])
def test_layers_drawn_together_are_unbiased(backbone, credit):
    """Two layers over two events: all 8 x 8 pairs of masks, 16 x 16 where attention is bidirectional."""
    model = build(backbone, layers=2, heads=1, d_model=4, length=2, l0=0.0, jacobian=0.0, dropout=0.0, estimator="ar")
    model = with_settings(model.double(), credit=credit)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for mask in model.masks:
        torch.nn.init.normal_(mask.raw_XLL, mean=-0.2, std=0.1)
    valid = model.valid(torch.tensor([[3, 7]]))[0]
    entries = int(valid.sum())
    bits = torch.tensor(list(itertools.product((0, 1), repeat=2 * entries))).double().view(-1, 2, entries)
    z = torch.zeros(2, len(bits), 1, 2, 2).double()
    z[:, :, 0, valid] = bits.transpose(0, 1)
    phi = [mask.logits(2).detach().requires_grad_() for mask in model.masks]
    keep = [x.sigmoid() for x in phi]
    chance = [torch.where(a > 0, b, 1 - b)[:, 0, valid].prod(1) for a, b in zip(z, keep, strict=True)]
    probability, batch = chance[0] * chance[1], make_batch([[3, 7]] * len(bits))
    for mask, drawn in zip(model.masks, z, strict=True):
        mask.drawn_BXLL = drawn
    (probability * example_loss(model)(model(batch)).sum(1).detach()).sum().backward()

    model._uniform = lambda *_: [torch.where(a > 0, b / 2, (1 + b) / 2).detach() for a, b in zip(z, keep, strict=True)]
    total(model.training_loss(batch, example_loss(model, probability.detach()))).backward()

    for mask, x in zip(model.masks, phi, strict=True):
        exact = x.grad * valid
        assert exact.abs().max() > 1e-4
        torch.testing.assert_close(mask.raw_XLL.grad / model.options.mask_rate, exact)


@pytest.mark.parametrize(
    ("less", "more", "ratio"),
    [({"credit": "position"}, {"credit": "example"}, 0.8), ({"estimator": "arm"}, {"estimator": "ar"}, 1.0)],
)
def test_credit_to_positions_and_arm_vary_less(tiny, less, more, ratio):
    spread = []
    for options in (less, more):
        model, got = with_settings(tiny, **options), []
        for _ in range(200):
            model.zero_grad()
            got.append(estimate(model, torch.rand(1, 1, 3, 3).double(), torch.ones(1).double()))
        spread.append(torch.stack(got).var(0).sum().item())

    assert spread[0] < ratio * spread[1]


def test_a_baseline_is_the_mean_loss_of_the_others():
    events, loss = torch.tensor([2, 3, 5]), torch.tensor([0.2, 0.6, 1.0])
    real = torch.arange(5) >= 5 - events.unsqueeze(1)

    got = build(estimator="ar", baseline="loo")._baseline(loss, real)

    torch.testing.assert_close(got, torch.tensor([[1.6 / 8], [1.2 / 7], [0.8 / 5]]) * real)


def test_straight_through_passes_the_gradient_of_the_mask_on(tiny):
    model = with_settings(tiny, estimator="ste")
    uniform = torch.rand(4, 1, 3, 3).double()
    got = estimate(model, uniform, torch.ones(4).double())

    keep = model.masks[0].logits(3).sigmoid().detach()
    z = ((uniform < keep) | ~torch.ones(3, 3).tril().bool()).double().requires_grad_()
    model.masks[0].drawn_BXLL = z
    example_loss(model)(model(make_batch([ROW] * 4))).sum().backward()
    torch.testing.assert_close(got, (z.grad.sum(0) * keep * (1 - keep)).tril())


@pytest.mark.parametrize("draws", ["example", "batch"])
@pytest.mark.parametrize("estimator", ["arm", "ar"])
def test_an_entry_learns_from_the_examples_in_which_it_is_valid(estimator, draws):
    model = build(estimator=estimator, draws=draws, l0=0.0, jacobian=0.0, dropout=0.0, length=6, layers=2)
    batch = make_batch([[3, 7, 2], [5, 8]])
    torch.manual_seed(3)
    total(model.training_loss(batch, example_loss(model))).backward()

    for mask in model.masks:
        assert (mask.raw_XLL.grad[:, -3:, -3:] != 0).equal(torch.ones(1, 3, 3).tril().bool())
        outside = mask.raw_XLL.grad.clone()
        outside[:, -3:, -3:] = 0
        assert (outside == 0).all()


def test_both_passes_of_arm_drop_out_alike():
    """With masks that are certain, the two passes are equal, and so there is nothing to learn about the masks."""
    model = build(keep=1 - 1e-12, l0=0.0, jacobian=0.0, dropout=0.5).train()
    losses = []

    def task(query_BLD):
        losses.append((query_BLD @ model.item_vectors().T).logsumexp(-1))
        return losses[-1]

    total(model.training_loss(make_batch([[3, 7, 2], [5, 8, 1]]), task)).backward()

    assert len(losses) == 2
    assert torch.equal(losses[0], losses[1])
    assert all((mask.raw_XLL.grad == 0).all() for mask in model.masks)


# Masks.


def test_masks_multiply_weights_after_the_softmax():
    model = build(layers=1, length=4)
    scramble(model)
    mask = model.masks[0]
    score = torch.randn(2, 2, 4, 4)

    got = mask(score)

    phi = math.log(9) + 10 * mask.raw_XLL.detach().numpy()[0]
    keep = 1 / (1 + np.exp(-phi))
    weight = np.exp(score.numpy()) / np.exp(score.numpy()).sum(-1, keepdims=True)
    expected = weight * keep * (keep > 0.5)
    assert 0 < (keep > 0.5).mean() < 1
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-5, atol=1e-7)
    assert (got.sum(-1) < 1).all()
    model.masks[0].options = RecDenoiserOptions(binary=True)
    np.testing.assert_allclose(mask(score).detach().numpy(), weight * (keep > 0.5), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("attention", [{}, {"attention": "strided", "stride": 2}, {"attention": "entmax"}])
def test_padding_and_last_with_learned_masks(backbone, attention):
    model = build(backbone, **attention, l0=0.0).eval()
    scramble(model)
    batch = make_batch([[3, 7, 2, 9, 4], [5, 1, 8]])
    with torch.no_grad():
        whole = model(batch)
        torch.testing.assert_close(model(batch, last=True), whole[:, -1:], atol=1e-6, rtol=1e-5)
        alone = model(make_batch([[5, 1, 8]]))
    torch.testing.assert_close(whole[1:, -3:], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backbone", ["sasrec", "tisasrec", "ssept"])
def test_learned_masks_keep_causality_in_training_too(backbone):
    model = build(backbone, jacobian=0.0, dropout=0.0).eval()  # drawn masks, no other randomness
    scramble(model)
    queries = []

    def task(query_BLD):
        queries.append(query_BLD)
        return query_BLD.sum(2)

    for row in ([3, 7, 2, 9, 4], [3, 7, 2, 11, 12]):
        torch.manual_seed(1)
        model.training_loss(make_batch([row]), task)

    for one, other in (queries[::2], queries[1::2]):  # the opposite pass, and the one that trains
        torch.testing.assert_close(one[:, :3], other[:, :3])
        assert not torch.allclose(one[:, 3:], other[:, 3:])


def test_a_kept_diagonal_is_neither_drawn_nor_counted():
    model = build(keep_diag=True, length=3, layers=1, jacobian=0.0, l0=1.0, dropout=0.0)
    with torch.no_grad():
        model.masks[0].raw_XLL.fill_(-5.0)  # every other entry is dropped
    total(model.training_loss(make_batch([ROW]), example_loss(model))).backward()

    assert torch.equal(model.masks[0].at_test(3)[0], torch.eye(3))
    assert (model.masks[0].raw_XLL.grad.diagonal(dim1=1, dim2=2) == 0).all()
    assert model.sparsity(torch.tensor([ROW])) == 1.0


def test_sparsity_counts_valid_entries_alone():
    model = build(length=4, layers=2)
    with torch.no_grad():
        model.masks[0].raw_XLL[0, 3, 2] = -1.0  # Phi = log 9 - 10: dropped
        model.masks[0].raw_XLL[0, 0, 0] = -1.0  # valid in a full window only
        model.masks[1].raw_XLL[0, 1, 3] = -1.0  # the future: never valid

    assert model.sparsity(torch.tensor([[3, 7, 2, 9]])) == pytest.approx(2 / 20)
    assert model.sparsity(torch.tensor([[0, 0, 5, 1], [0, 0, 0, 4]])) == pytest.approx(1 / (2 * (3 + 1)))
    with pytest.raises(ValueError, match="no masks"):
        build(**PLAIN).sparsity(torch.tensor([[1]]))


def test_l0_is_the_expected_share_of_kept_valid_entries():
    model = build(length=4, layers=2, l0=0.5, jacobian=0.0)
    scramble(model)
    terms = model.training_loss(make_batch([[3, 7, 2], [5, 8]]), example_loss(model))

    keep = [torch.sigmoid(math.log(9) + 10 * mask.raw_XLL[0, -3:, -3:]) for mask in model.masks]
    valid = [torch.ones(3, 3).tril(), torch.zeros(3, 3)]
    valid[1][1:, 1:] = torch.ones(2, 2).tril()
    expected = sum((k * v).sum() for k in keep for v in valid) / (2 * (6 + 3))
    assert terms["l0"].item() == pytest.approx(0.5 * expected.item())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_without_masks_and_penalty_it_is_the_backbone_bit_for_bit(backbone):
    ours, theirs = build(backbone, **PLAIN).train(), make_model(backbone).train()
    theirs.load_state_dict(ours.backbone.state_dict())
    assert_same_training(ours, theirs)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("estimator", ["arm", "ar", "reinforce", "ste"])
def test_with_all_ones_as_masks_it_is_the_backbone_bit_for_bit(backbone, estimator):
    ours = build(backbone, l0=0.0, jacobian=0.0, keep=1 - 2**-53, estimator=estimator).train()
    theirs = make_model(backbone).train()
    state = {key: value for key, value in ours.backbone.state_dict().items() if not key.endswith("raw_XLL")}
    theirs.load_state_dict(state)
    for block in theirs.blocks:
        block.attention.weigh = torch.nn.Softmax(-1)  # the same order of operations as a mask needs
    ours._uniform = lambda examples, keep: [torch.full((examples, *part.shape), 0.5) for part in keep]
    assert_same_training(ours, theirs)


def assert_same_training(ours, theirs):
    batch = make_batch([[3, 7, 2, 9, 4], [5, 1, 8]])
    assert torch.equal(ours.eval()(batch, last=True), theirs.eval()(batch, last=True))
    results = []
    for model in (ours.train(), theirs.train()):
        torch.manual_seed(7)
        terms = model.training_loss(batch, example_loss(model))
        assert list(terms) == ["task"]
        terms["task"].backward()
        results.append((terms["task"], [p.grad for name, p in model.named_parameters() if "raw_XLL" not in name]))
    assert torch.equal(results[0][0], results[1][0])
    assert len(results[1][1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_explicit_attention_equals_the_fused_one():
    attention = MultiHeadAttention(8, 2, 0.0)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    x, bias = torch.randn(2, 5, 8), attention_bias(make_batch([[3, 7, 2, 9, 4], [5, 1]]).items, causal=True)
    fused = attention(x, x, bias)

    attention.weigh = torch.nn.Softmax(-1)
    torch.testing.assert_close(attention(x, x, bias), fused, atol=1e-4, rtol=1e-4)


# Jacobian.


def exact_jacobians(model, batch, real):
    """The squared norm of each block's Jacobian by torch.autograd.functional, over real positions."""
    with recorded(model.blocks) as calls:
        model(batch)
    norms = []
    for block, (x, *others) in zip(model.blocks, calls, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda z, b=block, o=others: b(z, *o), x, create_graph=True)
        norms.append((jacobian * real[..., None, None, None, None]).square().sum())
    return torch.stack(norms).sum()


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_penalty_is_the_exact_jacobian_over_many_probes(backbone):
    probes, rounds = 1000, 20
    model = build(backbone, d_model=4, length=3, layers=2, heads=1, jacobian_share=1.0, dropout=0.0).eval()
    scramble(model)
    batch = make_batch([[5, 8], [3, 7, 2]])
    batch = type(batch)(*(part[:1] for part in batch))  # one padded position
    real = batch.items != 0
    exact = exact_jacobians(model, batch, real)

    many = type(batch)(*(part.expand(probes, *part.shape[1:]) for part in batch))
    weight = model.blocks[0].attention.to_value.weight
    norm, got = torch.zeros(()), torch.zeros_like(weight)
    for _ in range(rounds):
        for mask in model.masks:
            mask.drawn_BXLL = mask.at_test(3).detach().expand(probes, -1, -1, -1)
        with recorded(model.blocks) as calls, torch.no_grad():
            model(many)
        value = model._jacobian(calls, many.items != 0)
        norm, got = norm + value.detach() / rounds, got + torch.autograd.grad(value, weight)[0] / rounds

    assert norm.item() == pytest.approx(exact.item() / 2, rel=0.03)  # two real positions
    for mask in model.masks:
        mask.drawn_BXLL = None
    (expected,) = torch.autograd.grad(exact_jacobians(model, batch, real) / 2, weight)
    assert (got - expected).norm() < 0.1 * expected.norm()


def test_a_share_of_the_batch_gives_the_whole_in_the_mean(monkeypatch):
    batch = make_batch([[3, 7, 2], [5, 8], [1, 2, 4], [9]])
    norms = []
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    model = build(dropout=0.0, jacobian=1.0, jacobian_share=0.25, attention="full", l0=0.0)
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [2, 0, 1, 3], [3, 0, 1, 2]):
        monkeypatch.setattr(torch, "randperm", lambda *_, order=order, **__: torch.tensor(order))
        norms.append(model.training_loss(batch, example_loss(model))["jacobian"].item())
    model.options = RecDenoiserOptions(**(vars(model.options) | {"jacobian_share": 1.0}))
    whole = model.training_loss(batch, example_loss(model))["jacobian"].item()

    assert len({round(norm, 6) for norm in norms}) == 4
    assert sum(norms) / 4 == pytest.approx(whole)


@pytest.mark.parametrize("detach", [True, False])
def test_the_penalty_reaches_the_layers_below_only_if_asked(detach):
    model = build(jacobian_detach=detach, dropout=0.0, jacobian_share=1.0)
    terms = model.training_loss(make_batch([ROW]), example_loss(model))
    gradient = torch.autograd.grad(terms["jacobian"], model.backbone.items.weight, allow_unused=True)[0]

    assert (gradient is None) is detach


@pytest.mark.parametrize("estimator", ["arm", "ste"])
def test_the_task_alone_judges_masks(estimator):
    model = build(estimator=estimator, dropout=0.0, jacobian_share=1.0)
    terms = model.training_loss(make_batch([ROW]), example_loss(model))

    for mask in model.masks:
        assert torch.autograd.grad(terms["jacobian"], mask.raw_XLL, retain_graph=True, allow_unused=True)[0] is None


def test_the_noise_of_the_masks_gradient_does_not_hold_the_backbone_back():
    model = build()
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 1e3 if name.endswith("raw_XLL") else 1e-6)

    clip_gradients(model, 1.0)

    assert model.backbone.items.weight.grad.unique().tolist() == pytest.approx([1e-6])
    masks = torch.cat([mask.raw_XLL.grad.flatten() for mask in model.masks])
    assert masks.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_the_penalty_is_computed_in_full_precision():
    model = build()
    types = []
    for block in model.blocks:
        block.inner.register_forward_hook(lambda _, inputs, out: types.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        terms = model.training_loss(make_batch([ROW] * 4), example_loss(model))

    assert types == [torch.bfloat16] * 4 + [torch.float32] * 2  # two passes of ARM, then the penalty
    assert terms["jacobian"].dtype == torch.float32
    total(terms).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# Attention to compare with.


def entmax_by_bisection(score):
    """1.5-entmax from its definition: the tau at which [x / 2 - tau]_+^2 sums to 1."""
    low, high = score.max() / 2 - 1, score.max() / 2
    for _ in range(200):
        middle = (low + high) / 2
        if (np.maximum(score / 2 - middle, 0) ** 2).sum() > 1:
            low = middle
        else:
            high = middle
    return np.maximum(score / 2 - low, 0) ** 2


def test_entmax_equals_bisection():
    score = torch.randn(3, 2, 4, 9).double() * 3
    score[0, 0, 0, 3:] = float("-inf")
    score[0, 0, 1, 1:] = float("-inf")
    score[0, 0, 2] = 0.5

    got = Entmax15()(score)

    expected = np.apply_along_axis(entmax_by_bisection, -1, score.numpy())
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-9)
    assert 0.2 < (got == 0).double().mean() < 0.9
    torch.testing.assert_close(got.sum(-1), torch.ones(3, 2, 4).double())


def test_entmax_has_the_derivatives_of_finite_differences():
    score = torch.randn(2, 1, 3, 5).double().requires_grad_()

    assert torch.autograd.gradcheck(Entmax15(), score)
    assert torch.autograd.gradgradcheck(Entmax15(), score)


def test_the_strided_pattern_reads_near_events_and_every_strideth():
    weights = StridedSoftmax(3)(torch.zeros(1, 1, 8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf")))

    for query in range(8):
        seen = [key for key in range(query + 1) if query - key < 3 or (query - key) % 3 == 0]
        expected = torch.zeros(8)
        expected[seen] = 1 / len(seen)
        torch.testing.assert_close(weights[0, 0, query], expected)
    torch.testing.assert_close(StridedSoftmax(3)(torch.zeros(1, 1, 1, 8))[0, 0, 0] > 0, weights[0, 0, 7] > 0)


# Two processes.

SETTINGS = [{}, {"estimator": "ar", "backbone": "tisasrec"}]
EXAMPLES = [[3, 7, 2, 9], [5, 8, 1], [4, 6], [2, 9, 11, 5], [1, 12], [8, 3, 6]]


def gradients(options, rank, size):
    """Return the gradients of every `size`-th example, from `rank` on, with random numbers of its own."""
    torch.manual_seed(0)
    model = make_model("rec_denoiser", dropout=0.0, jacobian_share=1.0, **options).eval()
    mine = slice(rank, None, size)
    batch = Batch(*(part[mine] for part in make_batch(EXAMPLES)))
    draws = torch.Generator().manual_seed(3)
    uniform = [torch.rand(len(EXAMPLES), 1, 4, 4, generator=draws)[mine] for _ in model.masks]
    noise = torch.randn(len(EXAMPLES), 4, 16, generator=draws)[mine]
    model._uniform = lambda *_: uniform
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", lambda x: noise)
        patch.setattr(torch, "randperm", lambda number, **_: torch.arange(number))
        weight = size / len(EXAMPLES)
        total(model.training_loss(batch, lambda q: (q @ model.item_vectors().T).logsumexp(-1) * weight)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def work(rank, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for number, options in enumerate(SETTINGS):
        mean = gradients(options, rank, 2)
        for gradient in mean.values():
            distributed.all_reduce(gradient)
            gradient /= 2  # as DDP averages them
        if rank == 0:
            torch.save(mean, folder / f"{number}.pt")
    distributed.destroy_process_group()


def test_two_processes_have_the_gradient_of_one(tmp_path):
    torch.multiprocessing.start_processes(work, (tmp_path,), nprocs=2, start_method="fork")

    for number, options in enumerate(SETTINGS):
        two = torch.load(tmp_path / f"{number}.pt")
        for name, gradient in gradients(options, 0, 1).items():
            assert "raw_XLL" not in name or gradient.abs().max() > 0
            torch.testing.assert_close(two[name], gradient, atol=1e-7, rtol=1e-4)
