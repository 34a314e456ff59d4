"""What the protocol of models/base.py promises, for every architecture and each objective it is trained with."""

from typing import get_args

import pytest
import torch
from support import MEMORY, draw_windows, has_option, make_batch, make_model, trained

from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.models import REGISTRY
from seqrec.models.base import PAD, Batch, Objective
from seqrec.training import losses, objectives
from seqrec.training.batches import Windows
from seqrec.training.step import LossTerms
from seqrec.training.train import user_tables

ROWS = [[3, 7, 2, 9, 4], [5, 1, 8], [6]]
OBJECTIVES = get_args(Objective)
MASK = 31  # make_model has 30 items
IMPOSSIBLE = {"dropout": 1.0, "attention_dropout": 1.0, "length": 0, "d_model": 0, "layers": -1, "heads": -1}
ITEMS = {"encoder": "items", "pooling": "mean"}  # a Recformer
PLAIN = {"attention": "full", "l0": 0.0, "jacobian": 0.0}  # a Rec-Denoiser
REFUSED = [  # options that exclude each other, that have no effect, or that one model limits, and part of the error
    *((name, {"heads": 3}, "heads") for name in ("sasrec", "bert4rec", "hstu", "strec", "recformer")),
    ("ssept", {"d_model": 24, "heads": 3}, "heads: a width of 40"),  # items and user
    ("rec_denoiser", {"backbone": "tisasrec", "heads": 3}, "heads"),
    ("bsarec", {"alpha": 1.1}, "alpha"),
    ("bsarec", {"cut": 13}, "cut"),
    ("caser", {"length": 4, "window": 5}, "window"),
    ("ssept", {"keep_item": 1.5}, "keep_item"),
    ("ssept", {"keep_user": -0.1}, "keep_user"),
    ("flash4rec", {"heads": 2}, "user_gate"),
    ("flash4rec", {"heads": 3, "user_gate": False}, "even share"),
    ("flash4rec", {"heads": 2, "user_gate": False, "d_value": 64}, "d_value: no effect"),
    ("flash4rec", {"attention_dropout": 0.1}, "topk_dropout to 0"),
    ("flash4rec", {"user_dropout": 0.1, "user_gate": False}, "user_dropout"),
    ("flash4rec", {"attributes": ("title",)}, "attributes: no effect"),
    ("flash4rec", {"experts": 1, "gate": "topk_then_softmax"}, "gate: no effect"),
    ("flash4rec", {"topk_dropout": 0.0, "topk_dropout_k": 3}, "topk_dropout_k: no effect"),
    ("strec", {"k": (5, 6)}, "k must not increase"),
    ("strec", {"k": (5,)}, "k needs one entry"),
    ("strec", {"k": (13, 1)}, "k must lie"),
    ("strec", {"k": (5, 1), "sparsity": 0.5}, "k and sparsity"),
    ("strec", {"sparsity": 1.0}, "sparsity"),
    ("strec", {"sampling": "none", "noise": "none", "alpha": "official"}, "noise, alpha"),
    ("strec", {"sampling": "random", "hash_bins": 5}, "hash_bins"),
    ("strec", {"sampling": "random", "noise": "none"}, "noise"),
    ("strec", {"attention_size": 3}, "attention_size"),
    ("strec", {"attention": "linformer"}, "attention"),
    ("strec", {"layers": 1}, "layers"),
    ("strec", {"alpha": "official"}, "alpha"),
    ("strec", {"temperature": 0.0}, "temperature"),
    ("rec_denoiser", {"attention": "full"}, "l0"),
    ("rec_denoiser", {"baseline": "loo"}, "baseline"),
    ("rec_denoiser", {"baseline": "loo", "estimator": "ar", "draws": "batch"}, "baseline"),
    ("rec_denoiser", {"keep": 1.0}, "keep"),
    ("rec_denoiser", {"mask_rate": 0.0}, "mask_rate"),
    ("rec_denoiser", {"jacobian_share": 0.0}, "jacobian_share"),
    ("rec_denoiser", {"stride": 4}, "stride: no effect"),
    ("rec_denoiser", {"estimator": "ste", "credit": "example"}, "credit: no effect"),
    ("rec_denoiser", PLAIN | {"binary": True}, "binary: no effect"),
    ("rec_denoiser", {"jacobian": 0.0, "jacobian_projections": 2}, "jacobian_projections: no effect"),
    ("rec_denoiser", {"backbone": "bert4rec", "objective": "causal"}, "objective"),
    ("recformer", {"window": 33}, "window"),
    ("recformer", {"max_tokens": 32}, "max_tokens"),
    ("recformer", {"piece_tokens": 10}, "piece_tokens"),
    ("recformer", {"attribute_tokens": 1}, "attribute_tokens"),
    ("recformer", {"frozen_words": ("evaluate",)}, "frozen_words"),
    ("recformer", {"temperature": 0.0}, "temperature"),
    ("recformer", {"mlm_probability": 1.0}, "mlm_probability"),
    ("recformer", {"objective": "causal", "encoder": "text", "layers": 2}, "causal needs encoder items"),
    ("recformer", {"d_history": 32}, "d_history: no effect, as encoder is text"),
    ("recformer", {"encoder": "items"}, "pooling must be mean with encoder items"),
    ("recformer", ITEMS | {"mlm_weight": 0.2}, "mlm_weight: no effect"),
    ("recformer", ITEMS | {"d_history": 3}, "d_history"),
]
REGULARISERS = ("dropout", "attention_dropout", "topk_dropout")
CASES = [  # what is trained with which objective and options
    *((architecture, objective, {}) for architecture, objective in trained(*OBJECTIVES)),
    ("flash4rec", "causal", {"heads": 2, "user_gate": False, "experts_per_token": 2, "norm": "post"}),
    ("flash4rec", "causal", {"experts": 1, "prediction_head": False, "activation": "sigmoid"}),
    ("unisrec", "causal", {"ids": True, "fixed_encoder": True}),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([*case[:2], *case[2]]))
def model(request):
    *given, options = request.param
    return build(*given, **options)


def build(architecture, objective, **options):
    return make_model(architecture, objective=objective, **options).eval()


def regularised(architecture, strength):
    return {name: strength for name in REGULARISERS if has_option(architecture, name)}


def asked(model, rows) -> Batch:
    """The batch that is served for the histories `rows`."""
    return model.asked(make_batch(rows))


def test_last_is_the_last_position_of_the_full_pass(model):
    batch = asked(model, ROWS)

    torch.testing.assert_close(model(batch, last=True), model(batch)[:, -1:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("architecture", "objective", "options"), [case for case in CASES if case[1] == "causal"])
def test_future_items_cannot_change_the_past(architecture, objective, options, training):
    """In training with the same random draws: what is dropped and rescaled at one place is no business of another."""
    options = regularised(architecture, 0.5 if training else 0.0) | options
    if "topk_dropout" in options:
        options |= {"attention_dropout": 0.0}
    model = build(architecture, objective, **options).train(training)
    queries = []
    for row in ([3, 7, 2, 9, 4], [3, 7, 2, 11, 12]):
        torch.manual_seed(5)
        queries.append(model(make_batch([row])))

    torch.testing.assert_close(queries[0][:, :3], queries[1][:, :3])


@pytest.mark.parametrize(("architecture", "objective"), trained("cloze"))
def test_a_masked_item_is_seen_from_both_sides(architecture, objective):
    model = build(architecture, objective)
    reference = model(make_batch([[3, 7, MASK, 9, 4]]))[:, 2]

    for row in ([3, 20, MASK, 9, 4], [3, 7, MASK, 20, 4]):
        assert (model(make_batch([row]))[:, 2] - reference).abs().max() > 1e-7


@pytest.mark.parametrize(("architecture", "objective"), trained(*OBJECTIVES))
def test_exactly_the_past_it_remembers_matters(architecture, objective):
    model = build(architecture, objective)
    reference = model(asked(model, [[3, 7, 2, 9, 4]]), last=True)

    for position in range(5):
        row = [3, 7, 2, 9, 4]
        row[position] = 20
        changed = (model(asked(model, [row]), last=True) - reference).abs().max() > 1e-7
        assert changed == (5 - position <= MEMORY.get(architecture, 5)), position


def test_padding_cannot_change_a_query(model):
    alone = model(asked(model, [[5, 1, 8]]), last=True)
    padded = model(asked(model, ROWS), last=True)[1:2]

    torch.testing.assert_close(alone, padded, atol=1e-6, rtol=1e-5)


def test_padding_is_no_source_of_nan(model):
    empty = Batch(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))

    assert model(empty).isfinite().all()
    assert model(empty, last=True).isfinite().all()


def examples(objective):
    """Two users' histories, and the item to predict at each position, PAD where there is none."""
    rows, following = [[3, 7, 2, 9, 4], [5, 1, 8, 6, 2]], torch.tensor([1, 3])
    batch = make_batch(rows)._replace(user=torch.tensor([1, 2]))
    if objective == "cloze":
        masked = torch.tensor([False, True, False, False, True])
        return batch._replace(items=batch.items.masked_fill(masked, MASK)), batch.items.masked_fill(~masked, PAD)
    target = torch.cat([batch.items[:, 1:], following[:, None]], 1)
    if objective == "last":
        target[:, :-1] = PAD
    return batch, target


@pytest.mark.parametrize("architecture", [name for name in sorted(REGISTRY) if MEMORY.get(name) != 0])
def test_one_batch_is_overfitted(architecture):
    objective = next(name for name in OBJECTIVES if name in REGISTRY[architecture].objectives)
    model = build(architecture, objective, **regularised(architecture, 0.0)).train()
    batch, target = examples(objective)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if architecture == "recformer" else 2e-2)

    def task(query_BPD, *, skip_last=False):
        scores = query_BPD @ model.item_vectors().T
        stop = target.shape[1] - skip_last
        goal = target[:, stop - query_BPD.shape[1] : stop].flatten()
        value = torch.nn.functional.cross_entropy(scores.flatten(0, 1), goal, ignore_index=PAD, reduction="none")
        return value.view(query_BPD.shape[:2]) / (goal != PAD).sum()

    def found():
        model.eval()
        best = (model(batch) @ model.item_vectors().T).argmax(-1)
        model.train()
        wanted = target[:, -best.shape[1] :]
        return (best == wanted)[wanted != PAD].all()

    for number in range(250):
        optimizer.zero_grad()
        loss = torch.stack(list(model.training_loss(batch, task).values())).sum()
        loss.backward()
        optimizer.step()
        if number % 5 == 4 and found():
            break

    assert found()


def test_every_parameter_is_trained_in_some_phase(model):
    batch, _ = examples(model.options.objective)
    phases = [phase for stage in ("pretrain", "finetune") for phase in model.phases(stage)]
    trained = set()
    for phase in phases:
        model.eval().enter(phase)
        with torch.no_grad():
            model.on_epoch()
        model.train().zero_grad(set_to_none=True)
        terms = model.training_loss(batch, lambda query, **_: (query @ model.item_vectors().T).logsumexp(-1))
        torch.stack(list(terms.values())).sum().backward()
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        assert {name for name, p in model.named_parameters() if p.grad is not None} == trainable, phase
        trained |= trainable

    assert trained == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["caser", "flash4rec", "fpmc", "mfbpr", "ssept"])
def test_an_unknown_user_begins_as_zero(architecture):
    (users,) = user_tables(make_model(architecture))

    assert not users.weight[0].any()
    assert users.weight[1:].any(1).all()


def test_an_objective_it_cannot_be_trained_with_is_refused(architecture):
    name, cls = architecture
    for objective in {"telepathy", *OBJECTIVES} - cls.objectives:
        with pytest.raises(ValueError, match="objective"):
            make_model(name, objective=objective)


def test_options_out_of_range_are_refused(architecture):
    for option, value in IMPOSSIBLE.items():
        if has_option(architecture[0], option):
            with pytest.raises(ValueError, match=option):
                make_model(architecture[0], **{option: value})


@pytest.mark.parametrize(("architecture", "options", "message"), REFUSED)
def test_options_that_contradict_are_refused(architecture, options, message):
    with pytest.raises(ValueError, match=message):
        make_model(architecture, **options)


@pytest.mark.parametrize(("architecture", "objective"), trained("causal", "last", "cloze"))
def test_every_target_has_the_same_weight(prepared, architecture, objective, monkeypatch):
    """The cross-entropy's gradient is computed in its forward pass, and on a GPU other weights are an error.

    A process that gets no window of a step adds nothing to its loss.
    """
    data = sequences.load(prepared)
    model = make_model(architecture, num_items=data.num_items, num_users=data.num_users, length=12, objective=objective)
    windows = Windows(*(values[:12] for values in draw_windows(data, length=12, objective=objective)[1]))
    blocks, weights = losses._blocks, []
    monkeypatch.setattr(losses, "_blocks", lambda *given: weights.append(given[6:]) or blocks(*given))
    step = LossTerms(model.train(), objectives.Loss(FinetuneConfig(), data.count), FinetuneConfig())
    for phase in model.phases("finetune"):
        model.enter(phase)
        with torch.no_grad():
            model.on_epoch()
        terms = step(objectives.example(data, model.options, FinetuneConfig(), windows, seed=0))
        sum(value for name, value in terms.items() if not name.startswith("figure/")).backward()
        one = Windows(*(values[:1] for values in windows))
        idle = objectives.example(data, model.options, FinetuneConfig(), one, seed=0, process=1, processes=2)
        assert (idle.number, float(step(idle)["task"].detach().sum())) == (0, 0)

    assert set(weights) == {()}
