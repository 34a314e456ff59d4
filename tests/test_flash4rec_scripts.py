"""scripts/flash4rec_variants.py: what routers read, and that variants train and load; flash4rec_routing.py: choices."""

from __future__ import annotations

import pytest
import support
import torch

from scripts import flash4rec_routing as routing
from scripts import flash4rec_variants as variants
from seqrec.data import sequences
from seqrec.models import REGISTRY
from seqrec.models.base import Batch

ALONE = sorted(set(variants.VARIANTS) - {"low-rank-experts-permuted"})  # the others do not read other histories


@pytest.fixture
def build(monkeypatch):
    """Return a function that makes a small variant; the variants are no longer registered after the test."""
    monkeypatch.setattr(REGISTRY, "data", dict(REGISTRY.data))
    monkeypatch.setattr(variants.Routed, "counts", torch.arange(31) ** 2)
    variants.settings()

    def made(name):
        torch.manual_seed(0)
        experts = {"experts": 1} if name.startswith("low-rank") else {"experts": 4, "d_router": 16}
        model = support.make_model(name, prediction_head=False, dropout=0.0, d_expert=16, **experts).eval()
        support.add_noise(model, 0.3)
        return model

    return made


def make_batch(rows, times):
    return support.make_batch(rows)._replace(times=torch.tensor(times).double())


@pytest.mark.parametrize("name", ALONE)
def test_a_query_depends_neither_on_padding_nor_on_later_events(name, build):
    model = build(name)
    both = make_batch([[4, 9, 2, 7, 30], [5, 20]], [[-900.0, -840, -90, -9, 0], [0, 0, 0, -400, 0]])
    changed = make_batch([[4, 9, 2, 7, 11]], [[-9900.0, -9840, -9090, -9009, 0]])
    short = make_batch([[5, 20]], [[-400.0, 0]])

    found = model(both)

    torch.testing.assert_close(model(changed)[0, :4], found[0, :4])
    torch.testing.assert_close(model(short)[0], found[1, 3:])
    torch.testing.assert_close(model(both, last=True), found[:, -1:])


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("routed-by-history-mean", {"items"}),
        ("routed-at-random", {"item"}),
        ("routed-by-popularity", {"item"}),
        ("routed-by-time-gap", {"times"}),
        ("low-rank-experts", {"items", "item", "times"}),
    ],
)
def test_a_router_reads_what_its_name_says(name, read, build):
    model = build(name)
    batch = make_batch([[4, 9, 2]], [[-900.0, -840, 0]])

    def last(batch: Batch):
        model.training_loss(batch, lambda query: query)
        return model.blocks[0].experts.router.noted[:, -1]

    changed = {
        "items": batch._replace(items=torch.tensor([[4, 8, 2]])),
        "item": batch._replace(items=torch.tensor([[4, 9, 25]])),
        "times": batch._replace(times=torch.tensor([[-900.0, -8, 0]]).double()),
    }
    own = last(batch)
    different = {what for what, other in changed.items() if not torch.equal(last(other), own)}
    assert different - {"item"} == read - {"item"}
    assert ("item" in different) == (name != "routed-by-time-gap")


def test_an_item_drawn_at_random_has_the_same_expert_each_time_in_each_block_another(build):
    model = build("routed-at-random")
    first, again = (variants.FixedRandom(model.options, model.catalogue) for _ in range(2))
    blocks = (first.blocks[0], again.blocks[0], first.blocks[1])
    table, same, other = (block.experts.router.network.weight for block in blocks)
    assert set(table.softmax(-1).flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(table, same)
    assert not torch.equal(table, other)


def test_summaries_are_exchanged_between_events_and_not_with_padding(build):
    model = build("low-rank-experts-permuted")
    batch = make_batch([[4, 9, 2, 7, 30], [5, 20]], [[-900.0, -840, -90, -9, 0], [0, 0, 0, -400, 0]])
    x, real = torch.randn(2, 5, 16), batch.items != 0
    own, given, again = variants.Summary.note(model, x, batch), model.note(x, batch), model.note(x, batch)

    assert torch.equal(given, again)
    assert torch.equal(given[~real], own[~real])
    assert not torch.equal(given[real], own[real])
    torch.testing.assert_close(given[real].sum(-1).sort().values, own[real].sum(-1).sort().values)
    model.train()
    assert any(not torch.equal(model.note(x, batch), given) for _ in range(5))


def test_dropout_before_the_softmax_hides_keys(build):
    model = build("topk-dropout-before-softmax")
    logit = torch.randn(2, 6, 6, requires_grad=True)
    towards = torch.randn(2, 6, 6)
    torch.manual_seed(4)
    kept = torch.rand(2, 6, 3) >= 0.5
    hidden = torch.zeros(2, 6, 6).scatter(-1, logit.topk(3).indices, (~kept).float()).bool()
    expected = logit.masked_fill(hidden, -torch.inf).softmax(-1)
    torch.manual_seed(4)

    found = model.topk_dropout(logit.softmax(-1), torch.ones(2, 6, dtype=torch.bool), 3, 0.5, "row")

    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(weight, logit, towards)[0] for weight in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_the_rate_falls_to_nothing_in_the_last_epoch(build):
    model = build("annealed-topk-dropout")
    weight, real = torch.rand(50, 6, 6).softmax(-1), torch.ones(50, 6, dtype=torch.bool)
    dropped = []
    for _ in range(model.options.epochs):
        model.on_epoch()
        dropped.append(float((model.topk_dropout(weight, real, 6, 0.5, "row") == 0).float().mean()))

    assert dropped[0] == pytest.approx(0.5, abs=0.05)
    assert dropped[4] == pytest.approx(0.5 * 5 / 9, abs=0.05)
    assert dropped[-1] == 0.0


@pytest.mark.parametrize(
    "name", ["routed-by-popularity", "routed-at-random", "annealed-topk-dropout", "low-rank-experts-permuted"]
)
def test_a_variant_trains_and_loads(name, build, prepared, tmp_path, monkeypatch):
    counts = sequences.load(prepared).count
    monkeypatch.setattr(variants.Routed, "counts", counts)
    options = support.OPTIONS["flash4rec"] | {"experts": 1 if name.startswith("low-rank") else 4}

    support.run(prepared, tmp_path, model=name, options=options, epochs=1)

    monkeypatch.setattr(variants.Routed, "counts", None)
    before, after = (support.load_checkpoint(tmp_path / folder).model for folder in ("initial", "finetuned"))
    assert type(after) is variants.VARIANTS[name]
    if isinstance(after, variants.Routed):
        assert torch.equal(after.count_V, counts)
    changed = {key for key, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[key])}
    routers = {key for key in after.state_dict() if "router" in key}
    assert routers.isdisjoint(changed) if name == "routed-at-random" else routers <= changed
    assert changed


def test_each_choice_replaces_what_its_name_says():
    expert_N1 = torch.tensor([2, 0, 2, 1, 2, 0, 3, 2]).unsqueeze(1)
    torch.manual_seed(0)

    chosen = {name: choice(torch.ones(8, 1), expert_N1, 4) for name, choice in routing.CHOICES.items()}

    assert chosen["as trained"][1].equal(expert_N1)
    other = chosen["the expert of another event"][1]
    assert not other.equal(expert_N1)
    assert other.sort(0).values.equal(expert_N1.sort(0).values)
    assert chosen["the busiest expert for all"][1].unique().tolist() == [2]
    assert set(chosen["a random expert"][1].flatten().tolist()) <= {0, 1, 2, 3}
    assert [bool(gate.any()) for gate, _ in chosen.values()] == [True, True, True, True, False]
