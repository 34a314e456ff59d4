"""Recformer: its input, its losses, its phases; the encoder's equality with Longformer is in test_pretrained.py."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter

import pyarrow as pa
import pytest
import support
import torch
from accelerate import Accelerator
from support import make_batch, make_model, make_tokens, prepare_rows, save_bert, synthetic_rows
from torch.nn import functional as F

from seqrec import artifacts
from seqrec.artifacts import write_table
from seqrec.config import EvaluateConfig, PretrainConfig
from seqrec.data import item_tokens, sequences
from seqrec.models.base import Catalogue
from seqrec.models.text_encoder import Neighbours, Text, mask_words
from seqrec.serving.recommender import Recommender
from seqrec.stages.evaluate import evaluate
from seqrec.training import pretrained, refit, validation
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.examples import Examples
from seqrec.training.families import train_parts

CLS, PAD = 2, 0  # of make_tokens


def build(**options):
    return make_model("recformer", **options).eval()


def tokens_of(model, item: int) -> list[int]:
    first, stop = model.texts.offsets[item : item + 2].tolist()
    return model.texts.ids[first:stop].tolist()


def test_a_history_is_cls_and_the_items_from_the_most_recent_one():
    rows, model = ((3, 7, 2, 9), (5,), ()), build()
    text = model.texts.flatten(make_batch([list(row) for row in rows]).items, 16)

    for row, history in enumerate(rows):
        ids, types, places = [CLS], [0], [0]
        for place, item in enumerate(reversed(history), start=1):
            own = tokens_of(model, item)
            ids += own
            types += [1] + [2] * (len(own) - 1)
            places += [place] * len(own)
        real = min(len(ids), 16)
        assert text.ids_BT[row].tolist() == (ids + [PAD] * 16)[:16]
        assert text.types_BT[row].tolist() == (types + [3] * 16)[:16]
        assert text.places_BT[row].tolist() == (places + [12] * 16)[:16]  # length of make_model
        assert text.real_BT[row].tolist() == [True] * real + [False] * (16 - real)


def test_items_without_text_and_empty_histories_are_cls_alone():
    tokens = make_tokens(30)
    tokens["offsets"][5] = tokens["offsets"][4]  # the tokens of item 4 become those of item 5
    model = build()
    model.use(Catalogue(30, 8, 12, tokens))

    alone, empty = model.encode(torch.tensor([[4]])), model.encode(torch.zeros(1, 5, dtype=torch.int64))

    torch.testing.assert_close(alone, empty)
    assert not torch.allclose(model.encode(torch.tensor([[5]])), empty)


def test_a_score_is_the_cosine_over_the_temperature():
    model = build(temperature=0.1)
    history, item = torch.tensor([[3, 7, 2]]), torch.tensor([[9]])

    score = model(make_batch([[3, 7, 2]]))[0, 0] @ model.item_vectors()[9]

    cosine = F.cosine_similarity(model.encode(history), model.encode(item))
    torch.testing.assert_close(score, cosine[0] / 0.1)


def test_the_vector_of_a_text_may_be_the_mean_over_its_tokens():
    model = build(pooling="mean", max_tokens=33)
    rows = [[3, 7, 2, 9], [5], list(range(1, 13)), []]  # the third has 37 tokens, of which the oldest are cut
    got = model.encode(make_batch(rows).items)

    for row, history in zip(got, rows, strict=True):
        items = torch.tensor([history or [0]])
        size = min(33, 1 + sum(len(tokens_of(model, item)) for item in history))
        text = model.texts.flatten(items, size)
        assert text.real_BT.all()
        torch.testing.assert_close(row, model.encoder(text, only_first=False)[0].mean(0))
    got.square().sum().backward()
    untrained = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert untrained == {name for name, _ in model.named_parameters() if name.startswith("head.")}


def random_rows(number: int):
    return [torch.randint(1, 31, (size,)).tolist() for size in torch.randint(2, 13, (number,)).tolist()]


def test_pieces_do_not_change_the_result():
    whole, pieces = build(), build(max_tokens=40, piece_tokens=64)
    whole_options, options = whole.options, pieces.options
    assert whole_options.max_tokens != options.max_tokens
    state = whole.encoder.state_dict()
    pieces.encoder.load_state_dict(state | {"positions.weight": state["positions.weight"][:40]})
    batch = make_batch(random_rows(9))
    assert len(pieces.encoder.in_pieces(lambda rows, width: rows, pieces.texts, batch.items)[0]) > 2

    torch.testing.assert_close(pieces(batch), whole(batch), atol=1e-5, rtol=1e-5)


ROWS = [[3, 7, 2], [5, 1], [6, 8, 4, 2], [9, 10, 11]]  # two rows have target 2


def contrast(score) -> float:
    """The mean over ROWS of -log softmax at the target; `score` is that of a history and an item."""
    losses = []
    for number, row in enumerate(ROWS):
        rivals = [other[-1] for place, other in enumerate(ROWS) if place == number or other[-1] != row[-1]]
        scores = [score(row[:-1], item).item() for item in rivals]
        losses.append(math.log(sum(map(math.exp, scores))) - scores[rivals.index(row[-1])])
    return sum(losses) / len(ROWS)


def test_the_contrast_is_a_softmax_over_the_targets_of_other_items():
    model = build(mlm_weight=0.0)
    model.enter("contrastive")

    got = model.training_loss(make_batch(ROWS), None)

    def vector(items):
        out = model.encode(torch.tensor([items])).detach()[0].double()
        return out / out.norm()

    expected = contrast(lambda history, item: vector(history) @ vector([item]) / 0.05)
    assert got.keys() == {"contrast"}
    assert got["contrast"].item() == pytest.approx(expected, rel=1e-4)


def test_hits_are_targets_nearer_than_every_other_one():
    model = build()
    rows = random_rows(20)
    targets = [row[-1] for row in rows]

    got = model.hits(make_batch(rows))

    for row, hit in zip(rows, got.tolist(), strict=True):
        scores = model(make_batch([row[:-1]]))[0, 0] @ model.item_vectors()[targets].T
        own, others = scores[targets.index(row[-1])], scores[torch.tensor(targets) != row[-1]]
        assert hit == bool(own > others.max())


def test_masking_hides_whole_words_but_neither_cls_nor_padding():
    real, starts = torch.ones(400, 100, dtype=torch.bool), torch.rand(400, 100) < 0.5
    real[:, 90:], starts[:, :2] = False, True
    ids = torch.randint(4, 1000, (400, 100))
    text = Text(ids, ids, ids, starts, real)

    masked, chosen = mask_words(text, 0.15, 3, 1000)

    assert not chosen[:, 0].any()
    assert not chosen[:, 90:].any()
    follows = ~text.start_BT & text.real_BT
    assert (chosen[:, 2:][follows[:, 2:]] == chosen[:, 1:-1][follows[:, 2:]]).all()
    assert chosen[:, 1:90].float().mean() == pytest.approx(0.15, abs=0.01)
    assert (masked.ids_BT[~chosen] == text.ids_BT[~chosen]).all()
    hidden, same = masked.ids_BT[chosen] == 3, masked.ids_BT[chosen] == text.ids_BT[chosen]
    assert hidden.float().mean() == pytest.approx(0.8, abs=0.02)
    assert same.float().mean() == pytest.approx(0.1, abs=0.02)


def test_the_word_loss_is_the_mean_over_hidden_tokens_of_both_texts():
    model = build(mlm_weight=0.5, mlm_probability=0.5)
    model.enter("contrastive")
    rows = [[3, 7, 2], [5, 1, 4]]
    torch.manual_seed(6)
    got = model.training_loss(make_batch(rows), None)["words"]

    torch.manual_seed(6)
    means = []
    for part in ([row[:-1] for row in rows], [row[-1:] for row in rows]):
        items = make_batch(part).items
        order = model.texts.sizes(items).sum(1).argsort(stable=True)
        width = 1 + int(model.texts.sizes(items).sum(1).max())
        text = model.texts.flatten(items[order], width)
        masked, chosen = mask_words(text, 0.5, model.texts.mask, model.encoder.words.num_embeddings)
        x = model.encoder(masked, only_first=False)
        x = F.layer_norm(F.gelu(model.head.dense(x)), (16,), model.head.norm.weight, model.head.norm.bias, 1e-12)
        log_p = (x @ model.encoder.words.weight.T + model.head.bias).log_softmax(-1)
        means.append(-log_p.gather(2, text.ids_BT.unsqueeze(2)).squeeze(2)[chosen].mean())
    torch.testing.assert_close(got, 0.5 * sum(means))


@pytest.mark.parametrize("frozen", [(), ("pretrain",), ("finetune",), ("pretrain", "finetune")])
def test_words_are_trained_where_they_are_not_frozen(frozen):
    model = build(frozen_words=frozen)

    for phase, stage in (("contrastive", "pretrain"), ("refresh", "finetune"), ("frozen", "finetune")):
        model.enter(phase)
        assert model.encoder.words.weight.requires_grad == (stage not in frozen)


def test_item_vectors_move_in_the_refresh_phase_alone():
    model = build()
    assert model.phases("finetune") == ("refresh", "frozen")
    assert build(refresh=False).phases("finetune") == ("frozen",)
    for phase, moves in (("contrastive", False), ("frozen", False), ("refresh", True)):
        model.enter(phase)
        before = model.item_vectors().clone()
        with torch.no_grad():
            model.encoder.norm.weight.add_(torch.randn(16))
        model.on_epoch()
        assert torch.equal(model.item_vectors(), before) != moves, phase


@pytest.mark.parametrize(("size", "block", "reach"), [(192, 64, 5), (192, 64, 64), (70, 70, 0)])
def test_a_block_reads_cls_and_its_neighbours_and_their_gradients_add_up(size, block, reach):
    local = torch.randn(2, size, 3 * 8, requires_grad=True)

    got = Neighbours.apply(local, 2, block, reach)

    expected = []
    for number, x in enumerate(local.chunk(3, -1)):  # query, key and value
        around = F.pad(x, (0, 0, reach, reach))  # beyond the ends there is zero
        rows = []
        for first in range(0, size, block):
            read = torch.cat([x[:, :1], around[:, first : first + block + 2 * reach]], 1)
            rows.append(read if number else x[:, first : first + block])
        expected.append(torch.stack(rows, 1).flatten(0, 1).unflatten(-1, (2, 4)).transpose(1, 2))
    torch.testing.assert_close(got, tuple(expected))
    weights = [torch.randn_like(x) for x in expected]
    torch.testing.assert_close(torch.autograd.grad(got, local, weights), torch.autograd.grad(expected, local, weights))


def items_model(**options):
    return make_model("recformer", objective="causal", **options).eval()


def test_without_layers_an_item_is_the_mean_of_its_embedded_words():
    model = items_model()
    encoder = model.encoder
    ids = torch.tensor([CLS, *tokens_of(model, 4)])
    types, places = torch.tensor([0, 1, *[2] * (len(ids) - 2)]), torch.tensor([0, *[1] * (len(ids) - 1)])
    embedded = encoder.words.weight[ids] + encoder.positions.weight[: len(ids)]
    embedded = embedded + encoder.types.weight[types] + encoder.places.weight[places]
    expected = F.normalize(encoder.norm(embedded).mean(0), dim=0)

    torch.testing.assert_close(model.vectors[4], expected)


def test_a_history_of_items_is_read_as_sasrec_reads_the_same_vectors():
    model = items_model(d_history=16, length=12)
    other = make_model("sasrec", layers=2, heads=2, dropout=0.0, length=12).eval()
    table = model.history.to_item(model.vectors)
    names = ("positions", "blocks.", "norm.")
    weights = {name: value for name, value in model.history.state_dict().items() if name.startswith(names)}
    other.load_state_dict({"items.weight": table, **weights})
    batch = make_batch([[3, 7, 2, 9, 4], [5, 1]])

    query, item = model(batch), model.item_vectors()

    torch.testing.assert_close(query, F.normalize(other(batch), dim=-1) / model.options.temperature)
    torch.testing.assert_close(item, F.normalize(table, dim=-1))


def test_a_step_encodes_only_the_items_that_it_needs_and_trains_their_words():
    """One row of two events is shorter than the catalogue, so items are encoded when they are read or scored."""
    model = items_model(dropout=0.0, history_dropout=0.0).train()
    gradients = []
    for at_once in (False, True):
        model.zero_grad()
        needed = []

        def task(query, at_once=at_once, needed=needed):
            if at_once:
                model.item_vectors()
            score = query[:, -1] @ model.vectors_of(torch.tensor([9, 3, 5])).T
            needed.extend((model.step.place_V >= 0).nonzero().flatten().tolist())
            return score.softmax(1)[:, 0]

        model.training_loss(make_batch([[3, 7]]), task)["task"].backward()
        gradients.append({name: part.grad for name, part in model.named_parameters() if part.grad is not None})
        assert needed == (list(range(len(model.vectors))) if at_once else [3, 5, 7, 9])
        assert model.step is None

    torch.testing.assert_close(*gradients)
    learnt = gradients[0]["encoder.words.weight"].abs().amax(1)
    own = {item: tokens_of(model, item)[-1] for item in (3, 7, 9, 5, 11)}  # of no other item
    assert all(learnt[own[item]] > 1e-6 for item in (3, 7, 9, 5))  # read in the history, or scored
    assert learnt[own[11]] < 1e-9


@pytest.mark.parametrize(("refresh", "phase"), [(True, "refresh"), (False, "frozen")])
def test_the_item_vectors_in_use_are_those_of_the_trained_words_or_constants(refresh, phase):
    model = items_model(refresh=refresh)
    assert model.phases("finetune") == (phase,)
    model.enter(phase)
    model.train()
    with torch.no_grad():
        model.encoder.words.weight.add_(torch.randn_like(model.encoder.words.weight))
    stale = model.vectors[1:].clone()

    model.eval()

    fresh = F.normalize(model.encode(torch.arange(1, 31)[:, None]), dim=-1)
    torch.testing.assert_close(model.vectors[1:], fresh if refresh else stale)
    assert not torch.allclose(stale, fresh)
    assert all(parameter.requires_grad == refresh for parameter in model.encoder.parameters())


def test_histories_of_items_are_pre_trained_by_the_contrast_over_fixed_vectors():
    model = items_model(refresh=False, mlm_weight=0.1)
    assert model.phases("pretrain") == ("contrastive",)
    assert items_model().phases("pretrain") == ()
    model.enter("contrastive")
    table = model.item_vectors().detach()

    got = model.training_loss(make_batch(ROWS), None)
    got["contrast"].backward()

    expected = contrast(lambda history, item: model(make_batch([history]), last=True)[0, 0] @ table[item])
    assert got.keys() == {"contrast"}
    assert got["contrast"].item() == pytest.approx(expected, rel=1e-4)
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith("history.")}


# The stages, on the synthetic log with titles in which an item's neighbours have words in common.
OPTIONS = {"length": 6, "d_model": 16, "d_inner": 32, "max_tokens": 64, "vocabulary": 300, "frozen_words": []}
SETTINGS = {"batch_size": 16, "warmup_steps": 2, "learning_rate": 5e-3, "prefixes_per_user": 2}
PRETRAIN = {"epochs": 1, "held_out": 0.2, "earliest_target": 0.5}
ITEMS = {"encoder": "items", "objective": "causal", "pooling": "mean", "layers": 0}


def dataset(folder, *, items: int = 40, seed: int = 0, title: str = "t"):
    folder.mkdir(exist_ok=True)
    prepared = prepare_rows(folder, synthetic_rows(users=50, items=items, seed=seed))
    names = [f"i{i}" for i in range(items)]
    titles = [f"{title}{i} {title}{i + 1} {title}{i // 5}x" for i in range(items)]
    write_table(folder / artifacts.ITEMS, pa.table([names, titles], schema=artifacts.ITEMS_SCHEMA))
    return prepared


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    dataset(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    dataset(folder, items=30, seed=1, title="s")
    return folder


def run_pretrain(target, out, sources=(), options=None, **config):
    return support.run_pretrain(
        "recformer", target, out, OPTIONS | (options or {}), sources, **(SETTINGS | PRETRAIN | config)
    )


def run_finetune(target, out, model="recformer", **config):
    return support.run_finetune(model, target, out, **(SETTINGS | config))


def vectors(folder):
    model = load_checkpoint(folder).model
    return model, model.item_vectors()


def test_both_stages_learn_the_pattern(target, tmp_path):
    options = {"mlm_weight": 0.0, "dropout": 0.0, "length": 3}
    values = run_pretrain(target, tmp_path, options=options, epochs=8, prefixes_per_user=4)
    assert values["valid/accuracy"] > 0.3  # chance: 0.1 of ten held-out users

    tuned = run_finetune(target, tmp_path, epochs=3)

    assert tuned["valid/ndcg@10"] > 0.2  # chance: 0.11
    seconds = artifacts.read_json(tmp_path / "finetuned" / artifacts.MODEL_CARD)["seconds"]
    assert seconds == pytest.approx(values["seconds"] + tuned["seconds"])
    history = (tmp_path / "finetuned" / artifacts.EPOCH_RECORDS).read_text()
    assert '"refresh"' in history
    assert '"frozen"' in history


def test_the_second_stage_keeps_what_the_first_left_unless_it_is_better(target, tmp_path, monkeypatch):
    run_pretrain(target, tmp_path)
    scores, validated = iter([0.5, 0.4, 0.5, 0.3, 0.2]), []  # two epochs; then the restored weights, and two epochs

    def validate(model, *_, **__):
        validated.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"valid/ndcg@10": next(scores), "valid/recall@10": 0.0, "valid/mrr": 0.0}

    monkeypatch.setattr(validation, "validate", validate)
    run_finetune(target, tmp_path, epochs=2)

    before, after = (vectors(tmp_path / name)[0].state_dict() for name in ("initial", "finetuned"))
    for name, value in validated[0].items():
        torch.testing.assert_close(after[name], value)
    torch.testing.assert_close(after["vectors"], before["vectors"])  # Algorithm 1: made before the epoch, and kept
    assert not torch.allclose(after["encoder.norm.weight"], before["encoder.norm.weight"])


@pytest.mark.parametrize("options", [{"mlm_weight": 0.0, "dropout": 0.0}, ITEMS], ids=["text", "items"])
def test_a_described_item_is_read_by_the_encoder_that_made_the_others(target, tmp_path, options):
    run_pretrain(target, tmp_path, options=options)
    run_finetune(target, tmp_path, epochs=2, learning_rate=2e-2)
    checkpoint = load_checkpoint(tmp_path / "finetuned")
    model = checkpoint.model
    assert checkpoint.card["parameters"] == sum(p.numel() for p in model.parameters())
    assert not any(name.startswith("table_encoder.") for name, _ in model.named_parameters())
    assert model.options.attributes == ("title",)  # nobody named them
    recommender = Recommender.load(tmp_path / "finetuned")

    described = {f"new {item_id}": {"title": recommender.titles[item_id]} for item_id in recommender.item_ids}
    grown = recommender._grown(described).engine.item_vectors
    rows, size = recommender.engine.item_vectors[1:], len(recommender.item_ids)
    torch.testing.assert_close(grown[1 + size :], rows, atol=1e-4, rtol=1e-4)


def assert_same_weights(one, other):
    weights = [load_checkpoint(folder).model.state_dict() for folder in (one, other)]
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name


def test_an_interrupted_pre_training_ends_like_one_that_was_not(target, tmp_path):
    run_pretrain(target, tmp_path / "whole")
    with support.interrupted(3):
        run_pretrain(target, tmp_path / "cut", save_steps=1)
    run_pretrain(target, tmp_path / "cut", save_steps=1)

    assert_same_weights(tmp_path / "whole" / "initial", tmp_path / "cut" / "initial")


@pytest.fixture(scope="module")
def tuned(target, tmp_path_factory):
    """A training that reads histories of items."""
    out = tmp_path_factory.mktemp("tuned")
    run_pretrain(target, out, options=ITEMS)
    run_finetune(target, out, epochs=2)
    return out


def test_an_interrupted_fine_tuning_ends_like_one_that_was_not(target, tuned, tmp_path):
    shutil.copytree(tuned / "initial", tmp_path / "initial")
    with support.interrupted(5):
        run_finetune(target, tmp_path, epochs=2, save_steps=1)
    run_finetune(target, tmp_path, epochs=2, save_steps=1)

    assert_same_weights(tuned / "finetuned", tmp_path / "finetuned")


def test_a_refit_that_dies_before_its_output_ends_like_one_that_did_not(target, tuned, tmp_path):
    def again(out):
        folders = {"initial": tuned / "initial", "refitted": tmp_path / out, "state": tmp_path / f"{out}-state"}
        finetuned = load_checkpoint(tuned / "finetuned")
        refit.retrain(model="recformer", sequences=target / "sequences", finetuned=finetuned, **folders)

    again("whole")
    with support.interrupted(load_checkpoint(tmp_path / "whole").epoch_records()[-1]["step"]):
        again("cut")
    again("cut")

    assert_same_weights(tmp_path / "whole", tmp_path / "cut")


def test_one_user_with_a_history_is_too_few_to_hold_one_out(target):
    data = sequences.load(target / "sequences")
    one = dataclasses.replace(
        data, train_stop=torch.where(torch.arange(data.num_users) == 3, data.train_stop, data.start)
    )
    with pytest.raises(ValueError, match="only one user has two training events"):
        train_parts([one], PretrainConfig())


def test_pre_training_reads_the_train_parts_alone(target, source):
    parts = [sequences.load(folder / "sequences") for folder in (target, source)]
    config = PretrainConfig(held_out=0.2, seed=3)

    made = train_parts(parts, config)

    rows, shift = [], 0
    for part in parts:
        for start, stop in zip(part.start.tolist(), part.train_stop.tolist(), strict=True):
            rows.append([item + shift for item in part.items[start:stop].tolist()])
        shift += part.num_items
    assert made.items.tolist() == [item for row in rows for item in row]
    assert (made.stop - made.start).tolist() == [len(row) for row in rows]
    held = made.train_stop == made.start
    assert int(held.sum()) == 20
    assert (made.train_stop[~held] == made.stop[~held]).all()
    cases = sequences.cases(made, "valid")
    assert cases.user.tolist() == held.nonzero().squeeze(1).tolist()
    assert made.items[cases.position].tolist() == [rows[user][-1] for user in cases.user.tolist()]
    assert len(sequences.cases(made, "test")) == 0
    trained = [item for row, out in zip(rows, held.tolist(), strict=True) if not out for item in row]
    assert made.count.tolist() == torch.bincount(torch.tensor(trained), minlength=shift + 1).tolist()


def test_sources_give_the_weights_and_the_target_the_catalogue(target, source, tmp_path):
    run_pretrain(target, tmp_path / "a", sources=[source])
    other = tmp_path / "other"
    dataset(other, items=25, seed=7, title="o")
    run_pretrain(other, tmp_path / "b", sources=[source])
    run_finetune(target, tmp_path / "a", epochs=0)

    (a, item_a), (b, item_b) = (vectors(tmp_path / name / "initial") for name in "ab")

    served = vectors(tmp_path / "a" / "finetuned")[0].state_dict()
    for name, value in a.state_dict().items():
        assert torch.equal(served[name], value), name
        if name != "vectors":  # zero-shot: nothing is learnt from the target, its words included
            assert torch.equal(b.state_dict()[name], value), name
    zero_shot = {"sequences": target / "sequences", "checkpoint": tmp_path / "a" / "initial", "report": tmp_path}
    assert 0 < evaluate(model="recformer", config=EvaluateConfig(), **zero_shot)["test/ndcg@10"] < 1
    assert (len(item_a), len(item_b)) == (41, 26)
    torch.testing.assert_close(item_b[1:].norm(dim=1), torch.ones(25))


def test_histories_of_items_learn_from_the_sources_and_serve_the_target(target, source, tmp_path):
    values = run_pretrain(target, tmp_path, sources=[source], options=ITEMS | {"refresh": False}, epochs=4)

    assert values["valid/accuracy"] > 0.2
    assert len(vectors(tmp_path / "initial")[1]) == 41


@pytest.mark.parametrize("changes", [{"options": ITEMS | {"refresh": True}}, {"epochs": 0}], ids=["refresh", "epochs"])
def test_without_pre_training_sources_are_not_read(target, source, tmp_path, caplog, changes):
    run_pretrain(target, tmp_path / "with", sources=[source], **changes)
    run_pretrain(target, tmp_path / "without", **changes)

    assert "models.recformer: `sources` are not read" in caplog.text
    ours, alone = ((tmp_path / name / "initial" / artifacts.TOKENIZER).read_bytes() for name in ("with", "without"))
    assert ours == alone  # it knows the words of the dataset itself


def test_a_pre_trained_model_starts_on_another_dataset(target, source, tmp_path):
    run_pretrain(source, tmp_path / "first")
    start = str(tmp_path / "first" / "initial")
    run_pretrain(target, tmp_path / "second", options={"start": start}, epochs=0)

    first, second = (vectors(tmp_path / name / "initial")[0].state_dict() for name in ("first", "second"))

    for name in first.keys() - {"vectors"}:
        assert torch.equal(first[name], second[name]), name


def test_other_text_is_another_pre_training(target, tmp_path):
    run_pretrain(target, tmp_path, epochs=0)
    first = artifacts.read_json(tmp_path / "initial" / artifacts.MODEL_CARD)["fingerprint"]
    changed = tmp_path / "changed"
    dataset(changed, title="u")
    run_pretrain(changed, tmp_path, epochs=0)

    assert artifacts.read_json(tmp_path / "initial" / artifacts.MODEL_CARD)["fingerprint"] != first


def test_text_is_asked_for(target, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"items\.parquet not found: run ingest first"):
        support.run(target / "sequences", tmp_path, "recformer", options=OPTIONS)


def texts_of(target):
    return item_tokens.read_texts(target / artifacts.ITEMS, sequences.read_items(target / "sequences"))


def run_another(architecture, target, out, sources=(), **options):
    options = {"length": 6, "d_model": 16, "layers": 1, "heads": 1} | options
    return support.run_pretrain(architecture, target, out, options, sources, **(SETTINGS | PRETRAIN))


@pytest.mark.parametrize(("architecture", "number"), [("s3rec", 0), ("recformer", 2)])
def test_pre_training_reads_every_prefix_or_so_many_a_user(target, architecture, number):
    """Also with objective causal, where fine-tuning makes one row of a history."""
    data = sequences.load(target / "sequences")
    model = make_model(architecture, num_items=data.num_items, length=6, objective="causal")
    config = PretrainConfig(batch_size=8, prefixes_per_user=number, earliest_target=0.0)
    examples = Examples(data, config, Accelerator(cpu=True))

    examples.draw(model, model.pretraining)
    rows = [row for example in examples.build(0, 0) for row in example.batch.items.tolist()]

    histories = [data.items[first:stop].tolist() for first, stop in zip(data.start, data.train_stop, strict=True)]
    users = [[tuple(row[:stop][-7:]) for stop in range(2, len(row) + 1)] for row in histories]
    expected = sum(min(number or len(prefixes), len(prefixes)) for prefixes in users)
    assert len(rows) == expected - expected % 8  # the rest fills no batch
    read = Counter(tuple(item for item in row if item) for row in rows)
    assert read <= Counter(prefix for prefixes in users for prefix in prefixes)


UNISREC = {"ids": True, "fixed_encoder": True, "experts": 2}


@pytest.mark.parametrize(("architecture", "options"), [("unisrec", UNISREC), ("zesrec", {})])
def test_text_vectors_are_frozen_and_those_of_the_target(target, source, tmp_path, architecture, options):
    texts = texts_of(target)
    start, tokenizer = save_bert(texts, tmp_path / "bert")
    sources = [source] if architecture == "unisrec" else []  # which learns from them and serves the target

    values = run_another(architecture, target, tmp_path, start=start, sources=sources, **options)
    run_finetune(target, tmp_path, epochs=1)

    first, last = (vectors(tmp_path / name)[0] for name in ("initial", "finetuned"))
    expected = pretrained.text_vectors(item_tokens.tokenise(texts, tokenizer, 32), start)
    for model in (first, last):
        torch.testing.assert_close(model.text_VX, expected)
    trained = {name for name, value in first.named_parameters() if not torch.equal(value, last.get_parameter(name))}
    if architecture == "zesrec":
        assert {"to_item.weight", "positions"} <= trained
    else:
        assert "valid/accuracy" in values
        assert len(first.items.weight) == len(expected)
        assert {"items.weight", "adaptor.maps.weight"} <= trained
        assert not any(name.startswith(("positions", "blocks")) for name in trained)  # fixed in fine-tuning


@pytest.mark.parametrize("architecture", ["s3rec", "flash4rec"])
def test_attributes_are_the_words_that_titles_share(target, tmp_path, architecture):
    gated = {"heads": 0} if architecture == "flash4rec" else {}
    values = run_another(architecture, target, tmp_path, attribute_values=2, **gated)
    run_finetune(target, tmp_path, epochs=1)

    assert (values["epochs"], "valid/accuracy" in values) == (architecture == "s3rec", False)
    model = vectors(tmp_path / "finetuned")[0]
    if architecture == "flash4rec":
        count = sequences.load(target / "sequences").count
        torch.testing.assert_close(model.own_V[1:], (count / (count + 10))[1:])
        model = model.words
    assert torch.equal(model.value_VM, item_tokens.attribute_values(texts_of(target), 2))
    assert model.value_VM[1:].min() > 0
