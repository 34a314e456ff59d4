"""FLASH4Rec's equations, each against an independent computation."""

import numpy as np
import pytest
import torch
from equations import gelu, layer_norm, sigmoid, silu
from support import make_batch, make_model

from seqrec.models.flash4rec import (
    Block,
    Experts,
    FLASH4RecOptions,
    GatedAttention,
    RotaryAttention,
    mix,
    rotate,
    topk_dropout,
)
from seqrec.models.layers import attention_bias


@pytest.mark.parametrize("phi", [silu, sigmoid])
def test_gated_attention_equals_numpy(phi):
    """Equations 1 to 6, written with loops."""
    options = FLASH4RecOptions(d_model=6, d_shared=4, d_value=5, topk_dropout=0.0, activation=phi.__name__)
    layer = GatedAttention(options).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, user = torch.randn(1, 4, 6).double(), torch.randn(1, 6).double()
    bias = torch.full((1, 4, 4), float("-inf")).double().triu(1)

    got = layer(x, user, bias, torch.ones(1, 4).bool(), slice(None))[0].detach().numpy()

    w = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    x, user = x[0].numpy(), user[0].numpy()
    z = phi(x @ w["to_shared.weight"].T + w["to_shared.bias"])  # (1)
    q, k = (z * w["scale"][i] + w["shift"][i] for i in (0, 1))
    v = phi(x @ w["to_value.weight"].T + w["to_value.bias"])  # (4)
    joined = np.concatenate([x, np.tile(user, (4, 1))], axis=1)
    w_u = np.concatenate([w["to_gate.weight"], w["user_to_gate.weight"]], axis=1)
    u = phi(joined @ w_u.T + w["to_gate.bias"])  # (5)

    def turn(vector, position):
        half = len(vector) // 2
        out = np.empty_like(vector)
        for i in range(half):
            angle = position * 10000 ** (-2 * i / len(vector))
            a, b = vector[i], vector[i + half]
            out[i], out[i + half] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return out

    for m in range(4):
        scores = np.array([turn(q[m], m) @ turn(k[n], n) / np.sqrt(4) for n in range(m + 1)])  # (3)
        a = np.exp(scores) / np.exp(scores).sum()  # (2)
        expected = (u[m] * (a @ v[: m + 1])) @ w["to_out.weight"].T + w["to_out.bias"]  # (6)
        np.testing.assert_allclose(got[m], expected, atol=1e-5)


def test_the_time_of_a_request_changes_the_queries_from_its_event_on():
    model = make_model("flash4rec", request_time=True, topk_dropout=0.0).eval()
    torch.nn.init.normal_(model.by_time.weight)
    batch = make_batch([[3, 7, 2]])._replace(times=torch.tensor([[-1e6, -1e4, -100.0]]).double())

    assert model.needs == {"times", "user"}
    for changed, time in ((2, -9e3), (1, -9e5), (0, -2e4)):  # an event is asked for by the one before it
        times = batch.times.clone()
        times[0, changed] = time
        moved = (model(batch) - model(batch._replace(times=times))).abs().amax(-1)[0] > 1e-6
        assert moved.tolist() == [position >= changed - 1 for position in range(3)], changed


@pytest.mark.parametrize("scope", ["matrix", "row"])
def test_attention_in_training_is_the_thinned_softmax(scope):
    options = FLASH4RecOptions(topk_dropout=0.5, topk_dropout_k=2, topk_dropout_scope=scope)
    items = torch.tensor([[0, 0, 3, 4, 5], [1, 2, 3, 4, 5]])
    query, key, value = torch.randn(2, 5, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 3)
    bias, real = attention_bias(items, causal=True), items != 0

    torch.manual_seed(3)
    got = mix(query, key, value, bias, real, options, training=True)

    weight = (query @ key.mT / 2 + bias).softmax(-1)  # eqs. 2 and 3, with a width of 4
    torch.manual_seed(3)
    thinned = topk_dropout(weight, real, k=2, p=0.5, scope=scope)
    torch.testing.assert_close(got, thinned @ value)
    assert not torch.allclose(got, weight @ value)


def dense_experts(layer: Experts, x, real):
    """Equation 10 with every expert run on every token."""
    logits = layer.router(x)
    probability = logits.softmax(-1)
    k = layer.options.experts_per_token
    top = probability.topk(k, dim=-1)
    chosen = torch.zeros_like(probability).scatter(-1, top.indices, 1.0)
    if layer.options.gate == "topk_then_softmax":
        gate = logits.masked_fill(chosen == 0, float("-inf")).softmax(-1)
    else:
        gate = probability * chosen
        gate = gate if k == 1 else gate / gate.sum(-1, keepdim=True)
    hidden = torch.nn.functional.gelu(torch.einsum("bld,xdf->blxf", x, layer.inner))
    outputs = torch.einsum("blxf,xfd->blxd", hidden, layer.outer)
    return (gate.unsqueeze(-1) * outputs).sum(2) * real.unsqueeze(-1)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("gate", ["softmax_then_topk", "topk_then_softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # one grouped kernel, and slices
def test_dispatch_equals_running_every_expert(k, gate, dtype):
    options = FLASH4RecOptions(d_model=8, d_expert=16, experts=4, experts_per_token=k, gate=gate)
    layer = Experts(options).to(dtype).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    if k < 4:  # an expert that nobody chooses
        with torch.no_grad():
            layer.router[2].bias[1] = -1e3
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    x = torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(2, 5, 8, dtype=dtype)

    got, _ = layer(x, real)
    expected = dense_experts(layer, x, real)
    torch.testing.assert_close(got, expected)

    sources = [x, layer.inner, layer.outer, layer.router[0].weight]
    ours = torch.autograd.grad((got * weight).sum(), sources)
    theirs = torch.autograd.grad((expected * weight).sum(), sources)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_the_router_learns_from_the_task_with_one_expert():
    """The printed eq. 8 gives gate 1 and no gradient; the default must not."""
    gradients = {}
    for gate in ("softmax_then_topk", "topk_then_softmax"):
        layer = Experts(FLASH4RecOptions(d_model=6, d_expert=5, gate=gate))
        mixed, _ = layer(torch.randn(1, 5, 6), torch.ones(1, 5).bool())
        mixed.square().sum().backward()
        gradients[gate] = layer.router[2].weight.grad.abs().sum().item()

    assert gradients["softmax_then_topk"] > 0
    assert gradients["topk_then_softmax"] == 0


def test_the_router_alone_sees_jitter_and_in_training_alone():
    """Equation 7: uniform over 1 - epsilon to 1 + epsilon, each entry by itself."""
    layer = Experts(FLASH4RecOptions(d_model=32, d_expert=8, jitter=0.05))
    with torch.no_grad():
        layer.router[0].weight.zero_()  # else another expert would be chosen
    x, real, seen = torch.randn(4, 50, 32), torch.ones(4, 50).bool(), []
    layer.router.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))

    trained, served = layer.train()(x, real)[0], layer.eval()(x, real)[0]

    torch.testing.assert_close(trained, served)
    factor = seen[0] / x.flatten(0, 1)
    assert 0.95 - 1e-5 < factor.min() < 0.951
    assert 1.049 < factor.max() < 1.05 + 1e-5
    assert factor.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.05)
    assert torch.equal(seen[1], x.flatten(0, 1))


def test_the_loss_has_the_balance_of_all_layers_weighted():
    model = make_model("flash4rec", layers=3, balance=0.5, jitter=0.0, dropout=0.0).train()
    layers = []
    for block in model.blocks:
        block.experts.register_forward_hook(lambda _, __, out: layers.append(out[1]))

    rows = torch.randint(1, 31, (40, 12)).tolist()
    terms = model.training_loss(make_batch(rows), lambda query: query.sum(2))

    balance, busiest, idlest, entropy = torch.stack(layers).unbind(1)
    assert terms["balance"].item() == pytest.approx(0.5 * balance.mean().item(), rel=1e-6)
    assert terms["figure/busiest_expert"] == busiest.max() > busiest.min()
    assert terms["figure/idlest_expert"] == idlest.min() < idlest.max()
    assert terms["figure/router_entropy"].item() == pytest.approx(entropy.mean().item(), rel=1e-6)
    terms["balance"].backward()
    assert all(block.experts.router[2].weight.grad.abs().sum() > 0 for block in model.blocks)


def attention(real):
    scores = torch.randn(*real.shape, real.shape[1])
    return scores.masked_fill(~real.unsqueeze(1), float("-inf")).nan_to_num(neginf=-1e30).softmax(-1)


@pytest.mark.parametrize("scope", ["matrix", "row"])
def test_topk_dropout_rescales_what_it_keeps_by_a_constant(scope):
    """The factor is the mass of an example, or of a row, over the mass that is kept; it has no gradient."""
    real = torch.ones(6, 9).bool()
    real[0, :4] = False
    weight = attention(real).requires_grad_()

    thinned = topk_dropout(weight, real, k=3, p=0.5, scope=scope)
    (thinned * torch.arange(9.0)).sum().backward()

    kept = (thinned != 0) | (weight == 0)
    dropped, third = ~kept & real.unsqueeze(-1), weight.topk(3).values[..., -1:].expand_as(weight)
    assert dropped.any()
    assert (weight[dropped] >= third[dropped]).all()
    mass = (weight * real.unsqueeze(-1)).detach()
    axes = (1, 2) if scope == "matrix" else 2
    factor = mass.sum(axes, keepdim=True) / (mass * kept).sum(axes, keepdim=True)
    torch.testing.assert_close(thinned[real], (weight * kept * factor)[real])
    torch.testing.assert_close(weight.grad[real], (kept * factor * torch.arange(9.0)).expand_as(weight)[real])


def test_topk_dropout_drops_each_of_the_largest_with_its_probability():
    real = torch.ones(2000, 6).bool()
    weight = attention(real)

    thinned = topk_dropout(weight, real, k=3, p=0.25, scope="matrix")

    dropped = (thinned == 0).gather(-1, weight.argsort(-1, descending=True)).float().mean((0, 1))
    torch.testing.assert_close(dropped, torch.tensor([0.25, 0.25, 0.25, 0, 0, 0]), atol=0.02, rtol=0)  # five sd


@pytest.mark.parametrize("scope", ["matrix", "row"])
def test_topk_dropout_keeps_the_mass_of_weights_in_bf16(scope):
    """Nearly all of it is in what may be dropped: what remains is a difference of nearly equal sums."""
    real = torch.ones(500, 6).bool()
    weight = (torch.tensor([6.0, 4.0, 0.0, 0.0, -1.0, -2.0]).expand(500, 6, 6)).softmax(-1).bfloat16()

    thinned = topk_dropout(weight, real, k=2, p=0.5, scope=scope)

    mass = thinned.float().sum(-1)
    mass, expected = (mass.sum(-1), 6.0) if scope == "matrix" else (mass, 1.0)
    torch.testing.assert_close(mass, torch.full_like(mass, expected), atol=0.0, rtol=0.01)


@pytest.mark.parametrize(("objective", "scope"), [("causal", "row"), ("last", "matrix"), ("cloze", "matrix")])
def test_topk_dropout_rescales_by_row_where_the_future_must_not_be_known(objective, scope):
    assert FLASH4RecOptions(objective=objective).rescaled == scope
    assert FLASH4RecOptions(objective=objective, topk_dropout_scope="matrix").rescaled == "matrix"


def test_user_dropout_takes_its_share_of_the_sequences_for_unknown_in_training_alone():
    model = make_model("flash4rec", user_dropout=0.25, dropout=0.0, topk_dropout=0.0, jitter=0.0)
    with torch.no_grad():
        model.users.weight.normal_()
    batch = make_batch([[1, 2, 3]] * 1000)
    unknown = model(make_batch([[1, 2, 3]], user=0))[0]

    told, served = model.train()(batch), model.eval()(batch)

    share = (told - unknown).abs().amax((1, 2)).lt(1e-5).float().mean().item()
    assert share == pytest.approx(0.25, abs=0.055)  # four standard deviations
    assert (served - unknown).abs().amax((1, 2)).min() > 1e-3


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_order_of_normalisation_in_a_block(norm):
    block = Block(FLASH4RecOptions(d_model=16, norm=norm)).eval()
    x, user, real = torch.randn(2, 5, 16) * 3, torch.randn(2, 16), torch.ones(2, 5).bool()
    bias, everything = attention_bias(real.long(), causal=True), slice(None)

    got = block(x, user, bias, real, everything)[0]

    def attended(source):
        return block.attention(source, user, bias, real, everything)

    def computed(source):
        return block.experts(source, real)[0]

    def normal(source):
        return torch.nn.functional.layer_norm(source, (16,))

    if norm == "pre":
        inner = x + attended(normal(x))
        expected = inner + computed(normal(inner))
    else:
        inner = normal(x + attended(x))
        expected = normal(inner + computed(inner))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("head", [True, False])
def test_what_surrounds_the_blocks_equals_numpy(norm, head):
    """Pre-norm blocks end with a normalisation. A head is two layers; without it, the blocks read scaled items."""
    model = make_model("flash4rec", norm=norm, prediction_head=head).eval()
    inputs, outputs = [], []
    model.blocks[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model.blocks[-1].register_forward_hook(lambda _, __, out: outputs.append(out[0]))

    got = model(make_batch([[3, 7, 2]]))[0].detach().numpy()

    items = model.items.weight[[3, 7, 2]].detach()
    np.testing.assert_allclose(inputs[0][0].detach(), items if head else 4 * items, rtol=1e-6)
    x = outputs[0][0].detach().numpy()
    x = layer_norm(x) if norm == "pre" else x
    if head:
        first, second = ([part.detach().numpy() for part in model.head[i].parameters()] for i in (0, 3))
        x = layer_norm(gelu(x @ first[0].T + first[1])) @ second[0].T + second[1]
    np.testing.assert_allclose(got, x, atol=1e-5)


@pytest.mark.parametrize(("experts", "head"), [(4, True), (4, False), (1, False)])
def test_weights_start_at_the_scale_that_keeps_their_inputs(experts, head):
    """A standard deviation of 1 / sqrt(inputs); without a head, a tenth of it at the ends of the branches."""
    sizes = {"d_model": 32, "d_shared": 16, "d_value": 48, "d_expert": 64}
    model = make_model("flash4rec", experts=experts, prediction_head=head, **sizes)

    for name, weight in model.named_parameters():
        _, _, kind = name.rpartition(".")
        if weight.ndim > 1 and name.startswith(("blocks", "head")) and kind not in ("scale", "shift"):
            inputs = weight.shape[-2] if kind in ("inner", "outer") else weight.shape[-1]
            tenth = not head and (".outer" in name or ".to_out" in name)
            assert weight.std().item() * inputs**0.5 == pytest.approx(0.1 if tenth else 1.0, rel=0.15), name


def test_plain_attention_equals_scores_by_hand():
    """The ablation: per head, rotated scores / sqrt(width), softmax over visible keys."""
    layer = RotaryAttention(FLASH4RecOptions(d_model=8, heads=2, user_gate=False)).eval()
    items = torch.tensor([[1, 2, 3, 4], [0, 0, 3, 4]])
    x, bias = torch.randn(2, 4, 8), attention_bias(items, causal=True)

    got = layer(x, x[:, -1], bias, items != 0, slice(None))

    for row in (0, 1):
        visible = torch.ones(4, 4).tril().bool() & (items[row] != 0) | torch.eye(4).bool()
        q, k, v = layer.to_all(x)[row].chunk(3, -1)
        heads = []
        for part in (slice(0, 4), slice(4, 8)):
            rotated_q, rotated_k = rotate(q[:, part], k[:, part])
            scores = rotated_q @ rotated_k.T / 2
            heads.append(scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v[:, part])
        torch.testing.assert_close(got[row], layer.to_out(torch.cat(heads, -1)))


def test_plain_dropout_drops_weights_in_training_alone():
    model = make_model("flash4rec", topk_dropout=0.0, attention_dropout=0.5, dropout=0.0, jitter=0.0)
    batch = make_batch([[3, 7, 2, 9, 4]])

    assert torch.equal(model.eval()(batch), model(batch))
    assert not torch.allclose(model.train()(batch), model(batch))


def test_routing_figures_are_those_of_the_real_tokens():
    layer = Experts(FLASH4RecOptions(d_model=8, experts=4, jitter=0.0)).train()
    x, real = torch.randn(2, 5, 8), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()

    balance, busiest, idlest, entropy = layer(x, real)[1].tolist()

    share = layer.router(x[real]).softmax(-1)
    load = torch.bincount(share.argmax(-1), minlength=4) / 8
    assert balance == pytest.approx(4 * (load @ share.mean(0)).item())  # (11), without lambda
    assert (busiest, idlest) == pytest.approx((load.max().item(), load.min().item()))
    assert entropy == pytest.approx(-(share * share.log()).sum(-1).mean().item(), abs=1e-6)
