"""STRec: the gathered path against masks and against a plain loop, its sampler, and what a layer may not compute."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_batch, make_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.meter import peak_bytes
from seqrec.models.base import Batch
from seqrec.models.strec import FORCED, GRID, Sampler, STRecOptions, _standardised


def make_strec(**options):
    """A model in eval mode whose weights are large enough for attention to be uneven."""
    model = make_model("strec", **options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not name.startswith("sampler"):
                parameter.normal_(std=0.4)
        model.items.weight[0] = 0
    return model


def histories(lengths, width, seed=0) -> Batch:
    """Left-padded random histories; times between a second and a year, some of them equal."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width)
    items = torch.randint(1, 31, shape, generator=generator)
    times = -torch.exp(torch.randint(0, 18, shape, generator=generator).float()).sort(1, descending=True).values
    padding = torch.arange(width) < width - torch.tensor(lengths).unsqueeze(1)
    times = (times - times[:, -1:]).masked_fill(padding, 0)
    return Batch(items.masked_fill(padding, 0), times, torch.arange(1, len(lengths) + 1))


# the gathered path


def naive(model, batch) -> torch.Tensor:
    """Return (B, D), one sequence and one query at a time, with index sets and no padding."""
    outputs = []
    for items, times in zip(batch.items, batch.times, strict=True):
        length = int((items != 0).sum())
        single = Batch(items[None, -length:], times[None, -length:], torch.ones(1, dtype=torch.int64))
        score = model._scores(single, None, hard=True)[0].tolist()
        ranked = sorted(range(length), key=lambda i: -score[i])
        x = {i: model._embedded(single.items)[0, i] for i in range(length)}
        for block, k in zip(model.blocks, model.options.rows, strict=True):
            x = {i: naive_block(block, x[i], torch.stack(list(x.values()))) for i in ranked[:k]}
        outputs.append(x[length - 1])
    return torch.stack(outputs)


def naive_block(block, query, source):
    attention, d = block.attention, len(query)
    width = d // attention.heads
    weight, shift = attention.project.weight, attention.project.bias
    mixed = []
    for head in range(attention.heads):
        q_rows = slice(head * width, (head + 1) * width)
        k_rows = slice(d + 2 * head * width, d + (2 * head + 1) * width)
        v_rows = slice(d + (2 * head + 1) * width, d + (2 * head + 2) * width)
        q, k, v = (x @ weight[r].T + shift[r] for x, r in ((query, q_rows), (source, k_rows), (source, v_rows)))
        mixed.append(torch.softmax(k @ q / math.sqrt(width), 0) @ v)
    x = block.norm_attention(query + attention.to_out(torch.cat(mixed)))
    return block.norm(x + block.outer(F.gelu(block.inner(x))))


OPTIONS = st.fixed_dictionaries(
    {
        "length": st.integers(2, 14),
        "layers": st.integers(2, 4),
        "heads": st.sampled_from([1, 2, 4]),
        "noise": st.sampled_from(["normal", "uniform", "logistic"]),
        "sampling": st.sampled_from(["time", "position", "random"]),
        "mask": st.sampled_from(["log", "literal"]),
        "noise_seed": st.integers(0, 5),
    }
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(options=OPTIONS, data=st.data())
def test_masked_path_equals_gathered_path_and_a_plain_loop(options, data):
    length = options["length"]
    ks = data.draw(st.lists(st.integers(1, length), min_size=options["layers"], max_size=options["layers"]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    model = make_strec(k=tuple(sorted(ks, reverse=True)), **options)
    width = data.draw(st.integers(1, length))
    lengths = data.draw(st.lists(st.integers(1, width), min_size=1, max_size=4))
    batch = histories(lengths, width)

    with torch.no_grad():  # as it is served
        gathered = model(batch, last=True)[:, 0]
        torch.testing.assert_close(gathered, model(batch)[:, -1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gathered, naive(model, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[12, 12], [12, 5, 1]])
def test_as_many_rows_as_events_give_exactly_the_backbone(lengths):
    model = make_strec(layers=3, k=(12, 12, 1))
    backbone = make_model("strec", layers=3, sampling="none").eval()
    backbone.load_state_dict(model.state_dict(), strict=False)
    batch = histories(lengths, 12)

    assert torch.equal(model(batch, last=True), backbone(batch, last=True))


class Recorder(TorchDispatchMode):
    """Notes every operation of a pass: its name, the shapes of its results, and its keywords."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shapes = [x.shape for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.calls.append((func.__name__, shapes, kwargs or {}))
        return out


@pytest.mark.parametrize("full", [True, False])
def test_served_path_has_no_square_tensor_no_mask_and_one_sort(full):
    n, ks = 37, (11, 7, 7, 1)
    model = make_strec(length=n, layers=4, k=ks, d_model=16)
    batch = histories([37, 37, 37] if full else [37, 20, 9], n)
    with torch.no_grad(), Recorder() as recorder:
        model(batch, last=True)

    assert not [shape for _, shapes, _ in recorder.calls for shape in shapes if shape.count(n) >= 2]
    assert sum(name.startswith(("topk", "sort", "argsort")) for name, *_ in recorder.calls) == 1
    masks = [keywords.get("attn_mask") for name, _, keywords in recorder.calls if "attention" in name]
    # six: the first and the last layer in two halves; the shortest history has 9 events: 7 ranked rows hold no padding
    widths = [None if mask is None else mask.shape[-1] for mask in masks]
    assert widths == ([None] * 6 if full else [n, n, 11, None, None, None])
    assert all(mask is None or mask.shape[-2] == 1 for mask in masks)


def test_peak_memory_is_at_most_forty_percent_of_the_backbones():
    shape = {"length": 100, "d_model": 64, "layers": 4, "heads": 4}
    batch = histories([100] * 4, 100)
    sparse, dense = make_model("strec", sparsity=0.69, **shape), make_model("strec", sampling="none", **shape)
    with torch.inference_mode():
        peaks = [peak_bytes(lambda m=m: m.eval()(batch, last=True)) for m in (sparse, dense)]

    assert peaks[0] <= 0.4 * peaks[1]


# the soft path


def soft_reference(model, batch, literal):
    """Return (B, n, D) by eqs. 9-12 with the outer product M, from the masks S of the model."""
    real = batch.items != 0
    masks = model._masks(batch, real, soft=True)
    x = model._embedded(batch.items)
    for number, block in enumerate(model.blocks):
        attention = block.attention
        d, heads = x.shape[-1], attention.heads
        projected = x @ attention.project.weight.T + attention.project.bias
        q = projected[..., :d].unflatten(-1, (heads, -1))
        k, v = projected[..., d:].unflatten(-1, (heads, 2, -1)).unbind(-2)
        both = torch.einsum("bq,bk->bqk", masks[number + 1], masks[number])[:, None]
        bias = 1e8 * (both - 1) if literal else (both + 1e-9).log()
        logits = torch.einsum("bqhc,bkhc->bhqk", q, k) / math.sqrt(d // heads) + bias
        weights = logits.masked_fill(~real[:, None, None], -math.inf).softmax(-1)
        x = block.norm_attention(x + attention.to_out(torch.einsum("bhqk,bkhc->bqhc", weights, v).flatten(2)))
        x = block.norm(x + block.outer(F.gelu(block.inner(x))))
    return x


@pytest.mark.parametrize("mask", ["log", "literal"])
def test_soft_masks_follow_the_equations(mask):
    model = make_strec(mask=mask, layers=3, k=(8, 5, 1), dropout=0.0, temperature=0.2)
    batch = histories([12, 7], 12)

    got = model._masked(batch, soft=True, last=False)[:, -1]

    torch.testing.assert_close(got, soft_reference(model, batch, mask == "literal")[:, -1], atol=1e-4, rtol=1e-4)


def test_the_samplers_gradient_is_that_of_a_finite_difference():
    model = make_strec(layers=3, k=(8, 5, 1), dropout=0.0, temperature=0.5).double()
    batch = histories([12, 9], 12)
    batch = batch._replace(times=batch.times.double())
    target = torch.randn(2, 1, 16, dtype=torch.float64)

    def loss():  # eval mode: the noise is fixed, the running quantiles are not moved
        return (model._masked(batch, soft=True, last=True) * target).sum()

    weight = model.sampler.inner.weight
    direction, step = torch.randn_like(weight), 1e-5
    loss().backward()
    with torch.no_grad():
        weight += step * direction
        above = loss()
        weight -= 2 * step * direction
        slope = (above - loss()) / (2 * step)

    assert slope.abs() > 1e-6
    torch.testing.assert_close((weight.grad * direction).sum(), slope, atol=1e-8, rtol=1e-4)


# the sampler


def test_scores_are_standardised_over_the_events_of_a_sequence():
    value = torch.tensor([[9.0, 1, 2, 6], [9, 9, 9, 5], [2, 2, 2, 2]])
    real = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]).bool()

    got = _standardised(value, real)

    deviation = math.sqrt((2**2 + 1**2 + 3**2) / 3)  # around the mean 3
    torch.testing.assert_close(got[0, 1:], torch.tensor([-2, -1, 3]) / deviation, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1:][real[1:]], torch.zeros(5))
    full = torch.randn(4, 7)
    torch.testing.assert_close(_standardised(full, None), _standardised(full, torch.ones(4, 7).bool()))


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        ("raw", [-7200.0, -60.0, 0.0]),
        ("asinh", [-math.log(120 + math.sqrt(120**2 + 1)), -math.log(1 + math.sqrt(2)), 0.0]),
        ("log1p", [-math.log(7201), -math.log(61), 0.0]),
    ],
)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_relevance_is_a_small_network_of_the_transformed_time(transform, expected, activation):
    sampler = Sampler(STRecOptions(transform=transform, activation=activation))
    act = np.tanh if activation == "tanh" else lambda x: np.maximum(x, 0)
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in sampler.parameters())

    value = [float(act(w1[:, 0] * x + b1) @ w2[0] + b2[0]) for x in expected]

    got = sampler.relevance(torch.tensor([-7200.0, -60.0, 0.0]))
    torch.testing.assert_close(got.detach(), torch.tensor(value, dtype=torch.float32), atol=1e-4, rtol=1e-4)


def test_position_sampling_sees_an_event_a_minute():
    by_place = make_strec(sampling="position", noise="none")
    by_time = make_strec(sampling="time", noise="none")
    by_time.load_state_dict(by_place.state_dict())
    batch = histories([12, 8], 12)
    regular = make_batch([[1] * 12, [1] * 8])

    torch.testing.assert_close(
        by_place._scores(batch, batch.items != 0, hard=True),
        by_time._scores(regular, regular.items != 0, hard=True),
    )


@pytest.mark.parametrize(
    ("noise", "mean", "deviation"),
    [("normal", 0.0, 1.0), ("uniform", 0.5, 12**-0.5), ("logistic", 0.0, math.pi / 3**0.5), ("none", 0.0, 0.0)],
)
@pytest.mark.parametrize("training", [True, False])
def test_noise_has_its_distribution(noise, mean, deviation, training):
    sampler = Sampler(STRecOptions(noise=noise)).train(training)
    draws = sampler._noise(histories([40] * 400, 40))

    assert float(draws.mean()) == pytest.approx(mean, abs=0.05)
    assert float(draws.std()) == pytest.approx(deviation, abs=0.05)


def test_noise_at_inference_depends_on_the_seed_and_not_on_the_batch():
    batch = histories([12, 12, 7], 12)
    draws = [make_strec(noise_seed=seed).sampler._noise(batch) for seed in (0, 0, 1)]
    alone = make_strec().sampler._noise(Batch(batch.items[2:, -7:], batch.times[2:, -7:], batch.user[2:]))

    assert torch.equal(draws[0], draws[1])
    assert not torch.isclose(draws[0], draws[2]).any()
    assert torch.equal(draws[0][2:, -7:], alone)
    assert len(draws[0][:, :-1].unique()) == 33  # users do not share draws


def test_at_the_start_recent_events_score_higher():
    value = Sampler(STRecOptions()).relevance(-torch.logspace(8, 0, 50))

    assert (value.diff() > 0).all()


@pytest.mark.parametrize(("length", "noise"), [(50, "normal"), (30, "logistic"), (17, "normal")])
def test_calibrated_masks_hold_as_many_rows_as_are_served(length, noise):
    model = make_strec(length=50, layers=4, k=(25, 12, 5, 1), noise=noise).train()
    generator = torch.Generator().manual_seed(1)

    for _ in range(60):
        batch = histories([50] * 16 + [30] * 16, 50, seed=int(torch.randint(99_999, (), generator=generator)))
        model._masks(batch, batch.items != 0, soft=True)
    batch = histories([length] * 256, 50)
    masks = model.eval()._masks(batch, batch.items != 0, soft=True)[1:]

    for mask, k in zip(masks, (25, 12, 5, 1), strict=True):
        held = float((mask.detach() * (batch.items != 0)).sum(1).mean())
        assert held == pytest.approx(min(k, length), rel=0.1), k
    assert all((below <= above + 1e-6).all() for above, below in itertools.pairwise(masks))


def test_running_quantiles_follow_those_of_the_batches():
    sampler = Sampler(STRecOptions())
    score, real = 3 + torch.randn(64, 50), torch.ones(64, 50, dtype=torch.bool)
    real[:, :10] = False
    batch = histories([40] * 64, 50)
    for _ in range(400):
        sampler.measure(batch, score, real)

    expected = np.quantile(score[:, 10:-1].numpy(), np.linspace(0, 1, GRID))  # neither padding nor the last event
    np.testing.assert_allclose(sampler.scores.numpy(), expected, atol=1e-4)
    sampler.measure(batch, score, torch.zeros_like(real))  # nothing to measure
    sampler.measure(Batch(*(part[:0] for part in batch)), score[:0], real[:0])  # one process of several may get no rows
    np.testing.assert_allclose(sampler.scores.numpy(), expected, atol=1e-4)


def test_official_offsets_apply_to_every_sequence_alike():
    model = make_strec(layers=8, alpha="official", temperature=1.0)
    score = torch.tensor([[0.5, -1.0, FORCED]])
    mask = model.sampler.soft_mask(score, torch.ones(1, 3, dtype=torch.bool), 5)

    expected = [1 / (1 + math.exp(-(s - 0.5))) for s in (0.5, -1.0)]
    torch.testing.assert_close(mask[0], torch.tensor([*expected, 1.0]))


# the step function


def test_steps_are_means_of_the_network_over_bins_of_equal_weight():
    model = make_strec(hash_bins=4)
    sampler = model.sampler
    sampler.times.copy_(torch.linspace(-1000, 0, GRID))
    model.enter("hard")

    value = sampler.relevance(sampler.times).detach()
    bins = [range(0, 26), range(26, 51), range(51, 76), range(76, 101)]
    torch.testing.assert_close(sampler.steps, torch.stack([value[list(places)].mean() for places in bins]))
    torch.testing.assert_close(sampler.edges, torch.tensor([-745.0, -495.0, -245.0]))


def test_steps_are_served_after_stage_one_and_not_in_it():
    model, batch = make_strec(hash_bins=5, noise="none"), histories([12, 12], 12)
    exact = _standardised(model.sampler.relevance(batch.times), None)[:, :-1]

    model.enter("soft")
    torch.testing.assert_close(model._scores(batch, None, hard=True)[:, :-1], exact)
    model.enter("hard")
    served = model._scores(batch, None, hard=True)[:, :-1]
    assert not torch.allclose(served, exact)
    loaded = make_strec(hash_bins=5, noise="none")
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded._scores(batch, None, hard=True)[:, :-1], served)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"layers": 8, "k": (50, 20, 20, 5, 5, 5, 5, 1)}, (50, 20, 20, 5, 5, 5, 5, 1)),
        ({"layers": 3}, (16, 16, 1)),  # round(50 x 0.31 = 15.5)
        ({"layers": 2, "sparsity": 0.999}, (1, 1)),
        ({"layers": 2, "sampling": "none"}, (50, 1)),
        ({"layers": 2, "sampling": "none", "attention": "informer"}, (50, 50)),
    ],
)
def test_rows_of_each_layer(options, rows):
    assert STRecOptions(length=50, **options).rows == rows
