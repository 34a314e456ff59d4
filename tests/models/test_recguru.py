"""RecGURU against NumPy: representations, reconstruction, the two sides of the adversarial loss, and both stages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import support
import torch
from equations import attention, gelu, layer_norm, linear, softmax
from support import add_noise, make_batch, make_model, prepare_rows, synthetic_rows

from seqrec.data import sequences
from seqrec.models.recguru import domain_loss, reverse_gradient
from seqrec.training.checkpoint import load_checkpoint

HEADS, OWN, OTHERS = 2, 30, 10
ROWS = [[3, 7, 2, 9, 4], [5, 1], [8]]


def build(**options):
    model = make_model("recguru", dropout=0.0, heads=HEADS, **options)
    model.add_domain(OTHERS)
    add_noise(model, 0.2)
    return model.eval()


def weights_of(model):
    return {name: value.detach().double().numpy() for name, value in model.named_parameters()}


def embedded(weights, row):
    return layer_norm(weights["items.weight"][row] + weights["positions"][-len(row) :], weights, "norm")


def fed_forward(x, weights, name):
    inner = gelu(linear(x, weights, f"{name}.inner"))
    return layer_norm(x + linear(inner, weights, f"{name}.outer"), weights, f"{name}.norm")


def attended(x, weights, name):
    return layer_norm(x + attention(x, weights, f"{name}.attention", HEADS), weights, f"{name}.norm_attention")


def represented(model, row):
    """Return the outputs of the encoder: the GURs of the prefixes of a history, the last one that of all of it."""
    weights = weights_of(model)
    x = embedded(weights, row)
    for layer in range(len(model.encoder)):
        x = fed_forward(attended(x, weights, f"encoder.{layer}"), weights, f"encoder.{layer}")
    return x


def decoded(model, part, row, gurs):
    """Return the outputs of a decoder that attends at each position to five copies of a GUR."""
    weights = weights_of(model)
    x, gurs = embedded(weights, row), np.broadcast_to(gurs, (len(row), 16))
    for layer in range(len(model.decoder)):
        name = f"{part}.{layer}"
        x = attended(x, weights, name)
        copies = np.repeat(gurs[:, None], 5, 1)
        guided = np.einsum("c,lcd->ld", softmax(np.arange(5.0)), linear(copies, weights, f"{name}.from_gur"))
        x = fed_forward(layer_norm(x + guided, weights, f"{name}.norm_gur"), weights, name)
    return x


def losses(model, queries, targets):
    """Return the full softmax of each position over padding and the items of both domains."""
    scores = queries @ weights_of(model)["items.weight"].T
    return np.array([-np.log(softmax(row)[target]) for row, target in zip(scores, targets, strict=True)])


def softmax_task(model, targets):
    """The loss of every position against `targets` (1, P)."""

    def task(query, *, skip_last=False):
        scores = (query @ model.item_vectors().T).transpose(1, 2)
        wanted = torch.tensor(targets)[:, : len(targets[0]) - skip_last]
        return torch.nn.functional.cross_entropy(scores, wanted, reduction="none")

    return task


@torch.no_grad()
def test_a_query_reads_the_history_and_the_gur_of_each_prefix():
    model = build()
    for row in ROWS:
        expected = decoded(model, "recommender", row, represented(model, row))

        np.testing.assert_allclose(model(make_batch([row]))[0].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("length", [12, 4])  # longer than the history, and shorter: its newest events count
@torch.no_grad()
def test_pre_training_reconstructs_a_history_from_its_own_gur(length):
    model = build(length=length)
    model.enter("autoencoder")
    row = [3, 7, 2, 9, 4]
    gur = represented(model, row[-length:])[-1]
    expected = losses(model, decoded(model, "decoder", row[:-1], gur), row[1:])

    terms = model.training_loss(make_batch([row]), softmax_task(model, [row[1:]]))

    assert set(terms) == {"reconstruction", "domain"}
    assert terms["reconstruction"].item() == pytest.approx(expected.sum(), rel=1e-5)


@torch.no_grad()
def test_fine_tuning_reconstructs_only_what_the_encoder_has_read():
    model = build()
    row, targets = [3, 7, 2, 9], [7, 2, 9, 4]
    guided = decoded(model, "decoder", row, represented(model, row)[-1])
    following = losses(model, model(make_batch([row]))[0].double().numpy(), targets)

    terms = model.training_loss(make_batch([row]), softmax_task(model, [targets]))

    assert terms["reconstruction"].item() == pytest.approx(losses(model, guided, targets)[:-1].sum(), rel=1e-5)
    assert terms["task"].item() == pytest.approx(following.sum(), rel=1e-5)


@pytest.mark.parametrize("fixed", [True, False])
def test_the_next_item_trains_the_encoder_only_if_it_is_not_fixed(fixed):
    model = build(fixed_encoder=fixed)

    model(make_batch(ROWS)).sum().backward()

    assert all((parameter.grad is None) == fixed for parameter in model.encoder.parameters())
    assert all(parameter.grad is not None for parameter in model.recommender.parameters())


@torch.no_grad()
def test_the_discriminator_tells_the_domain_of_the_last_item():
    model = build()
    model.enter("autoencoder")
    rows = [[3, 7, 2], [31, 40, 33], [5, 1, 30]]
    logits = []
    for row in rows:
        x = represented(model, row)[-1]
        for number in (0, 3, 6):
            x = np.maximum(linear(x, weights_of(model), f"discriminator.{number}"), 0)
        logits.append(linear(x, weights_of(model), "discriminator.9").item())
    first, third = (math.log1p(math.exp(-logits[row])) for row in (0, 2))
    expected = (first + third) / 2 + math.log1p(math.exp(logits[1]))

    terms = model.training_loss(make_batch(rows), lambda query: query.sum(-1))

    assert [part.out_features for part in model.discriminator if hasattr(part, "out_features")] == [80, 160, 80, 1]
    assert terms["domain"].item() == pytest.approx(expected, rel=1e-5)


def test_the_encoder_climbs_the_loss_that_the_discriminator_descends():
    """By finite differences in double precision, for every row and a weight of the discriminator."""
    gur, weight = torch.randn(5, 3).double(), torch.randn(3).double()
    own = torch.tensor([True, False, True, True, False])

    def loss(gur, weight):
        value = np.logaddexp(0, np.where(own.numpy(), -1, 1) * (gur @ weight))
        return value[own.numpy()].mean() + value[~own.numpy()].mean()

    def slopes(function, x):
        steps = 1e-6 * np.eye(x.size).reshape(-1, *x.shape)
        return np.array([(function(x + s) - function(x - s)) / 2e-6 for s in steps]).reshape(x.shape)

    gur.requires_grad_()
    weight.requires_grad_()
    got = domain_loss(reverse_gradient(gur) @ weight, own)
    got.backward()

    x, w = gur.detach().numpy(), weight.detach().numpy()
    assert got.item() == pytest.approx(loss(x, w))
    np.testing.assert_allclose(weight.grad, slopes(lambda v: loss(x, v), w), atol=1e-8)
    np.testing.assert_allclose(gur.grad, -slopes(lambda v: loss(v, w), x), atol=1e-8)


def test_a_batch_of_one_domain_has_a_finite_loss():
    logit = torch.tensor([2.0, -1.0])
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(1))) / 2

    assert domain_loss(logit, torch.tensor([True, True])).item() == pytest.approx(expected)


def test_the_second_domain_leaves_no_trace():
    model, plain = build(), make_model("recguru")
    before = model.items.weight[: OWN + 1].clone()
    assert (len(model.items.weight), model.catalogue.num_items) == (OWN + 1 + OTHERS, OWN + OTHERS)

    model.drop_domain()

    assert torch.equal(model.items.weight, before)
    assert model.items.weight.requires_grad
    assert model.catalogue == plain.catalogue
    assert model.state_dict().keys() == plain.state_dict().keys()


OPTIONS = {"length": 6, "d_model": 16, "layers": 1, "heads": 1, "dropout": 0.2}
SETTINGS = {"batch_size": 16, "warmup_steps": 2, "learning_rate": 5e-3, "seed": 1}


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """The folders of a dataset and of a source."""
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "source")]
    for seed, (folder, items) in enumerate(zip(folders, (40, 25), strict=True)):
        prepare_rows(folder, synthetic_rows(users=50, items=items, seed=seed))
    return folders


def run_pretrain(domains, out, **config):
    target, source = domains
    return support.run_pretrain("recguru", target, out, OPTIONS, [source], **(SETTINGS | {"epochs": 3} | config))


def initial(out):
    return load_checkpoint(out / "initial").model


def history(out):
    return (out / "initial" / "history.jsonl").read_text()


def test_both_domains_are_pre_trained_on_and_the_target_is_fine_tuned(domains, tmp_path):
    values = run_pretrain(domains, tmp_path, patience=1)
    support.run_finetune("recguru", domains[0], tmp_path, **SETTINGS, epochs=1)

    target = sequences.load(domains[0] / "sequences")
    assert values["epochs"] == 3  # all of them: nothing is validated
    assert "loss/domain" in history(tmp_path)
    first, last = initial(tmp_path), load_checkpoint(tmp_path / "finetuned").model
    assert first.catalogue == last.catalogue == (target.num_items, target.num_users, 6, None)
    assert first.discriminator is None
    assert not torch.equal(first.recommender[0].inner.weight, last.recommender[0].inner.weight)


def test_without_sources_there_is_one_domain(domains, tmp_path):
    run_pretrain(domains, tmp_path, epochs=1, use_sources=False)

    assert "loss/domain" not in history(tmp_path)


def test_an_interrupted_pre_training_ends_the_same(domains, tmp_path):
    run_pretrain(domains, tmp_path / "whole")
    with support.interrupted(8):
        run_pretrain(domains, tmp_path / "parts", save_steps=2)
    run_pretrain(domains, tmp_path / "parts", save_steps=2)

    whole, parts = (initial(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
