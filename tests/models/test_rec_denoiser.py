"""Rec-Denoiser: estimators against all masks, the penalty against the exact Jacobian, the plug-in against backbones."""

import itertools
import math

import numpy as np
import pytest
import torch
from support import make_batch, make_model
from torch import distributed

from seqrec.models.base import Batch
from seqrec.models.rec_denoiser import BACKBONES, Entmax15, RecDenoiserOptions, StridedSoftmax, recorded
from seqrec.training.optimizer import clip_gradients

ROW = [3, 7, 2]
PLAIN = {"attention": "full", "l0": 0.0, "jacobian": 0.0}


def build(backbone="sasrec", **options):
    options = {"backbone": backbone, "objective": "cloze" if backbone == "bert4rec" else "causal"} | options
    return make_model("rec_denoiser", **options)


def scramble(model):
    """Give every mask entry a probability of its own, on both sides of one half."""
    for mask in model.masks:
        torch.nn.init.normal_(mask.raw_XLL, mean=-0.1, std=0.15)


def example_loss(model, weight_B=None):
    """A task: the log-sum-exp of the scores, at each position weighted by its number."""

    def task(query_BLD):
        value_BL = (query_BLD @ model.item_vectors().T).logsumexp(-1) * torch.arange(1, query_BLD.shape[1] + 1)
        return value_BL if weight_B is None else value_BL * weight_B.unsqueeze(1)

    return task


def total(terms):
    return torch.stack(list(terms.values())).sum()


# Estimators. Two layers read two events of at most three: 3 entries of a mask are valid, or 4 with bidirectional
# attention. Every pair of masks is an example of one batch.


def tiny(backbone="sasrec", **options):
    """A model in double precision, with unequal probabilities and a loss that the masks move a lot."""
    torch.manual_seed(1)
    sizes = {"layers": 2, "heads": 1, "d_model": 4, "length": 3}
    model = build(backbone, **sizes, l0=0.0, jacobian=0.0, dropout=0.0, **options).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for mask in model.masks:
        torch.nn.init.normal_(mask.raw_XLL, mean=-0.2, std=0.1)
    return model


def enumerated(model, cells):
    """Return every choice of one of `cells` for the valid entries of both masks, (2, N, 1, 2, 2), and these entries."""
    valid = model.valid(torch.tensor([[3, 7]]))[0]
    choices = torch.tensor(list(itertools.product(range(cells), repeat=2 * int(valid.sum()))))
    index = torch.zeros(2, len(choices), 1, 2, 2, dtype=torch.int64)
    index[:, :, 0, valid] = choices.unflatten(1, (2, -1)).transpose(0, 1)
    return index, valid


def exact_gradients(model, row):
    """The gradients, in the raw parameters of both masks, of sum_Z p(Z) loss(Z) over all masks Z."""
    raw = [mask.raw_XLL.detach().requires_grad_() for mask in model.masks]
    keep = torch.stack([(math.log(9) + 10 * x[:, -2:, -2:]).sigmoid() for x in raw]).unsqueeze(1)
    z, valid = enumerated(model, 2)
    probability = torch.where(z > 0, keep, 1 - keep)[:, :, 0, valid].prod(-1).prod(0)
    for mask, drawn in zip(model.masks, z.double(), strict=True):
        mask.drawn_BXLL = drawn
    with torch.no_grad():
        loss = example_loss(model)(model(make_batch([row] * len(probability)))).sum(1)
    return torch.autograd.grad((probability * loss).sum(), raw)


def estimates(model, uniform, batch, weight=None):
    """The estimated gradients for draws `uniform` of both layers, with these weights of the examples."""
    model._uniform = lambda *_: uniform
    return torch.autograd.grad(
        total(model.training_loss(batch, example_loss(model, weight))), [mask.raw_XLL for mask in model.masks]
    )


def cell_draws(model):
    """Draws in the middle of each cell of [0, 1] in which masks are constant, and the probability of each.

    Losses are constant in a cell and estimators linear in U: the middle gives the cell's mean exactly.
    """
    keep = torch.stack([mask.logits(2).sigmoid().detach() for mask in model.masks])
    inner = [keep]
    if model.options.estimator == "arm":  # which looks at a mask and at its opposite
        inner = [torch.minimum(keep, 1 - keep), torch.maximum(keep, 1 - keep)]
    edges = torch.stack([torch.zeros_like(keep), *inner, torch.ones_like(keep)], -1).unsqueeze(1)
    index, valid = enumerated(model, edges.shape[-1] - 1)
    edges = edges.expand(*index.shape, -1)
    low, high = (edges.gather(-1, (index + i).unsqueeze(-1)).squeeze(-1) for i in (0, 1))
    return (low + high) / 2, (high - low)[:, :, 0, valid].prod(-1).prod(0)


@pytest.mark.parametrize("credit", ["position", "example"])
@pytest.mark.parametrize(
    ("backbone", "estimator"), [("sasrec", "ar"), ("sasrec", "reinforce"), ("sasrec", "arm"), ("bert4rec", "ar")]
)
def test_estimators_are_unbiased_over_all_masks(backbone, estimator, credit):
    model = tiny(backbone, estimator=estimator, credit=credit)
    uniform, probability = cell_draws(model)
    assert probability.sum().item() == pytest.approx(1)

    got = estimates(model, list(uniform), make_batch([[3, 7]] * len(probability)), probability)

    for ours, exact in zip(got, exact_gradients(model, [3, 7]), strict=True):
        assert exact.abs().max() > 1e-2
        torch.testing.assert_close(ours, exact)


def test_one_draw_for_a_batch_is_unbiased_as_well():
    """The gradient of the sum of the losses of two examples that share each pair of masks."""
    model, batch = tiny(estimator="ar", draws="batch"), make_batch([[3, 7], [5, 9]])
    uniform, probability = cell_draws(model)
    expected = [sum(parts) for parts in zip(*(exact_gradients(model, row) for row in ([3, 7], [5, 9])), strict=True)]

    got = [torch.zeros_like(part) for part in expected]
    for i, p in enumerate(probability):
        for part, estimate in zip(got, estimates(model, list(uniform[:, i : i + 1]), batch), strict=True):
            part += p * estimate

    torch.testing.assert_close(got, expected)


def test_a_query_of_a_mask_is_judged_by_the_positions_that_it_can_affect():
    loss = torch.tensor([[1.0, 2.0, 4.0]])

    for options, below in (({}, [7, 6, 4]), ({"backbone": "bert4rec"}, [7, 7, 7]), ({"credit": "example"}, [7, 7, 7])):
        first, last = build(**options)._credit(loss)
        assert first.tolist() == [below]
        assert last.tolist() == ([[7, 7, 7]] if "credit" in options else loss.tolist())


def test_a_baseline_is_the_mean_loss_of_the_others():
    events, loss = torch.tensor([2, 3, 5]), torch.tensor([0.2, 0.6, 1.0])
    real = torch.arange(5) >= 5 - events.unsqueeze(1)

    got = build(estimator="ar", baseline="loo")._baseline(loss, real)

    torch.testing.assert_close(got, torch.tensor([[1.6 / 8], [1.2 / 7], [0.8 / 5]]) * real)


def test_straight_through_passes_the_gradient_of_the_mask_on():
    model, batch = tiny(estimator="ste"), make_batch([[3, 7]] * 4)
    uniform = list(torch.rand(2, 4, 1, 2, 2).double())
    got = estimates(model, uniform, batch)

    keep = [mask.logits(2).sigmoid().detach() for mask in model.masks]
    future = ~torch.ones(2, 2).tril().bool()
    z = [((u < pi) | future).double().requires_grad_() for u, pi in zip(uniform, keep, strict=True)]
    for mask, drawn in zip(model.masks, z, strict=True):
        mask.drawn_BXLL = drawn
    example_loss(model)(model(batch)).sum().backward()
    for ours, drawn, pi in zip(got, z, keep, strict=True):
        expected = (drawn.grad.sum(0) * 10 * pi * (1 - pi)).tril()
        torch.testing.assert_close(ours[:, -2:, -2:], expected)


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
    batch = make_batch([[3, 7, 2, 9, 4], [5, 1]])
    fused = theirs.eval()(batch)
    for block in theirs.blocks:
        block.attention.weigh = torch.nn.Softmax(-1)  # the same order of operations as a mask needs
    torch.testing.assert_close(theirs(batch), fused)
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


@pytest.mark.parametrize("backbone", ["sasrec", "bert4rec", "tisasrec"])
def test_the_penalty_is_the_exact_jacobian_over_a_basis_of_probes(backbone, monkeypatch):
    """One example a probe; the unit vectors have the second moments of the noise, but no variance."""
    probes = 3 * 4
    model = build(backbone, d_model=4, length=3, layers=2, heads=1, jacobian_share=1.0, dropout=0.0).eval()
    scramble(model)
    batch = make_batch([[0, 5, 8]])  # one padded position
    exact = exact_jacobians(model, batch, batch.items != 0) / (2 * probes)  # a real position

    many = type(batch)(*(part.expand(probes, *part.shape[1:]) for part in batch))
    for mask in model.masks:
        mask.drawn_BXLL = mask.at_test(3).detach().expand(probes, -1, -1, -1)
    with recorded(model.blocks) as calls, torch.no_grad():
        model(many)
    monkeypatch.setattr(torch, "randn_like", lambda output: torch.eye(probes).view_as(output))
    got = model._jacobian(calls, many.items != 0)

    torch.testing.assert_close(got, exact, atol=0, rtol=1e-4)
    weight = model.blocks[0].attention.to_value.weight
    torch.testing.assert_close(*(torch.autograd.grad(value, weight)[0] for value in (got, exact)))


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


def test_entmax_is_the_only_solution_of_its_definition():
    """1.5-entmax is [x / 2 - tau]_+^2 with the tau at which the weights sum to 1."""
    score = torch.randn(3, 2, 4, 9).double() * 3
    score[0, 0, 0, 3:] = float("-inf")
    score[0, 0, 1, 1:] = float("-inf")
    score[0, 0, 2] = 0.5

    got = Entmax15()(score)

    tau = (score / 2 - got.sqrt()).masked_fill(got == 0, float("-inf")).amax(-1, keepdim=True)
    torch.testing.assert_close(got, (score / 2 - tau).clamp(min=0).square())
    torch.testing.assert_close(got.sum(-1), torch.ones(3, 2, 4).double())
    assert 0.2 < (got == 0).double().mean() < 0.9


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

EXAMPLES = [[3, 7, 2, 9], [5, 8, 1], [4, 6], [2, 9, 11, 5], [1, 12], [8, 3, 6]]


def gradients(rank, size):
    """Return the gradients of every `size`-th example, from `rank` on, with random numbers of its own."""
    torch.manual_seed(0)
    model = make_model("rec_denoiser", dropout=0.0, jacobian_share=1.0, backbone="tisasrec").eval()
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
    mean = gradients(rank, 2)
    for gradient in mean.values():
        distributed.all_reduce(gradient)
        gradient /= 2  # as DDP averages them
    if rank == 0:
        torch.save(mean, folder / "mean.pt")
    distributed.destroy_process_group()


def test_two_processes_have_the_gradient_of_one(tmp_path):
    torch.multiprocessing.start_processes(work, (tmp_path,), nprocs=2, start_method="fork")

    two = torch.load(tmp_path / "mean.pt")
    for name, gradient in gradients(0, 1).items():
        assert "raw_XLL" not in name or gradient.abs().max() > 0
        torch.testing.assert_close(two[name], gradient, atol=1e-7, rtol=1e-4)
