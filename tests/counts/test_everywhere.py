"""A model with a count term gives the same scores wherever it is asked; without one, nothing changes."""

from dataclasses import asdict

import pyarrow.parquet as pq
import pytest
import torch
from support import make_model, run, save, weights

from seqrec.artifacts import COUNTS, MODEL_CARD, read_json, write_json
from seqrec.commands import recommend
from seqrec.config import ConfigError, CountsConfig, EvaluateConfig, FinetuneConfig, parse
from seqrec.counts import search, term
from seqrec.data import sequences
from seqrec.data.sequences import trained_until
from seqrec.evaluation import metrics, ranking
from seqrec.serving import approximate_search, onnx_engine, onnx_graph
from seqrec.serving.recommender import Recommender, Request
from seqrec.serving.torch_engine import TorchEngine
from seqrec.stages.evaluate import evaluate
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.refit import retrain

# EASE reads more events than the model's 12
CONFIG = CountsConfig(alpha=2.0, events=6, popularity=0.3, ease=20.0, ease_decay=0.9, ease_events=20, repeats=0.5)


def requests_of(data, folder):
    """Everybody's events before the test event, as requests, and what evaluation ranks for them."""
    item_ids, user_ids = sequences.read_items(folder), sequences.read_users(folder)
    rows = zip(data.start.tolist(), data.stop.tolist(), user_ids, strict=True)
    return [Request(history=[item_ids[i - 1] for i in data.items[a:b].tolist()], k=5, user=user) for a, b, user in rows]


def change_counts(saved, **values):
    """Change the entry `counts` of a model's card."""
    card = read_json(saved / MODEL_CARD)
    write_json(saved / MODEL_CARD, card | {"counts": card["counts"] | values})


@pytest.mark.parametrize(("architecture", "dense"), [("sasrec", 0), ("bert4rec", 1 << 24)])  # bert4rec's end in MASK
def test_ranking_service_graph_search_and_batch_agree(prepared, tmp_path, monkeypatch, architecture, dense):
    monkeypatch.setattr(term, "DENSE", dense)
    filter_seen = architecture == "sasrec"  # repeats count only without
    options, card = {"layers": 1}, {"filter_seen": filter_seen}
    saved, data = save(architecture, prepared, tmp_path / "saved", CONFIG, options, **card), sequences.load(prepared)
    requests, users = requests_of(data, prepared), torch.arange(data.num_users)
    checkpoint = load_checkpoint(saved)
    pure_scorer = ranking.model_scorer(checkpoint.model)
    scorer = term.with_counts(pure_scorer, checkpoint.count_term)
    item_BK, score_BK = ranking.best(scorer, data, users, data.stop, filter_seen=filter_seen, top_k=5)
    item_ids = sequences.read_items(prepared)

    recommend.score(sequences=prepared, saved=saved, output=tmp_path / "best.parquet", k=5)
    table = pq.read_table(tmp_path / "best.parquet")
    assert table["items"].to_pylist() == [[item_ids[i - 1] for i in row] for row in item_BK.tolist()]
    recommenders = [Recommender.load(saved), approximate_search.load(saved, 64)]
    if architecture == "bert4rec":  # test_baselines.py: the graph of counts alone
        onnx_graph.export(saved=saved, output=saved, k=15)
        recommenders.append(onnx_engine.load(saved))
    for recommender in recommenders:
        for answer, items, scores in zip(recommender.answer(requests), item_BK, score_BK, strict=True):
            assert answer.scores == pytest.approx(scores.tolist(), abs=1e-4)
            assert answer.items == [item_ids[i - 1] for i in items.tolist()]
    pure = ranking.best(pure_scorer, data, users, data.stop, filter_seen=filter_seen, top_k=5)
    assert not torch.equal(pure[0], item_BK)
    if architecture == "bert4rec":
        change_counts(saved, sha256="of others")
        with pytest.raises(ValueError, match="export it again"):
            onnx_engine.load(saved)


def test_explanations_add_the_events_own_shares(prepared, tmp_path):
    with_counts = Recommender.load(save("sasrec", prepared, tmp_path, CONFIG))
    pure = Recommender(
        TorchEngine(with_counts.engine.model), with_counts.item_ids, with_counts.counts, [], filter_seen=True
    )
    request = Request(history=["i1", "unheard of", "i2"])

    more = [a - b for a, b in zip(with_counts.explain(request, "i3"), pure.explain(request, "i3"), strict=True)]

    items_BL, item_B = torch.tensor([[pure.items["i1"], pure.items["i2"]]]), torch.tensor([pure.items["i3"]])
    first, last = with_counts.engine.term.shares(items_BL, item_B[:, None])[0, 0].tolist()
    assert more == pytest.approx([first, 0, last], abs=1e-5)
    assert last > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rho": None}, "config.json: counts.rho: Input should be a valid number"),  # or missing
        ({"alpha": [1]}, "config.json: counts.alpha"),
    ],
)
def test_wrong_settings_of_counts_are_refused(prepared, tmp_path, wrong, message):
    saved = save("sasrec", prepared, tmp_path, CONFIG)
    change_counts(saved, **wrong)

    with pytest.raises(ValueError, match=message):
        load_checkpoint(saved)


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """The same training, without counts, with chosen ones and with none that count."""
    root = tmp_path_factory.mktemp("trained")
    for name, counts in (("none", "none"), ("auto", "auto"), ("zero", {"alpha": 0})):
        run(prepared, root / name, epochs=2, counts=counts)
    return root


def metrics_of(prepared, root, name):
    paths = {"checkpoint": root / name / "finetuned", "report": root / name / "report"}
    values = evaluate(model="sasrec", sequences=prepared, **paths, config=EvaluateConfig(bootstrap=100))
    return values, pq.read_table(paths["report"] / "cases.parquet")


def test_counts_leave_the_training_alone(trained):
    for name in ("auto", "zero"):
        for ours, theirs in zip(weights(trained / name).values(), weights(trained / "none").values(), strict=True):
            assert torch.equal(ours, theirs)


def test_alpha_zero_is_the_pure_model(prepared, trained):
    pure, zero = (metrics_of(prepared, trained, name) for name in ("none", "zero"))

    assert pure[1].equals(zero[1])
    assert pure[0].keys() == zero[0].keys()
    assert zero[0]["counts/alpha"] == 0
    assert not (trained / "zero" / "finetuned" / COUNTS).exists()


def test_with_alpha_zero_popularity_has_no_weight_beside_ease_either(data):
    model = make_model("sasrec", num_items=40, num_users=60)
    config = FinetuneConfig(counts={"alpha": 0, "popularity": -3.0, "ease": 1.0})
    built, card = search.for_model(model, data, config, filter_seen=True)
    assert (built.popularity, card["popularity"]) == (0, 0)


def test_validation_is_reported_with_what_the_other_half_chose(prepared, data, trained):
    values, _ = metrics_of(prepared, trained, "auto")
    checkpoint = load_checkpoint(trained / "auto" / "finetuned")
    chosen = checkpoint.card["counts"]

    assert values["counts/alpha"] == chosen["alpha"] > 0
    assert values["valid/ndcg@10"] == pytest.approx(chosen["valid/ndcg@10"]["cross_fitted"])
    scorer = term.with_counts(ranking.model_scorer(checkpoint.model), checkpoint.count_term)
    ranked = ranking.rank(scorer, data, sequences.cases(data, "test"), filter_seen=True)
    assert values["test/ndcg@10"] == pytest.approx(metrics.ndcg(ranked.rank.numpy(), 10).mean())


def test_a_refit_keeps_the_values_and_counts_every_event(prepared, trained, tmp_path):
    folder = trained / "auto"
    shared = {"sequences": prepared, "initial": folder / "initial", "finetuned": load_checkpoint(folder / "finetuned")}
    retrain(model="sasrec", **shared, refitted=tmp_path / "refitted", state=tmp_path)

    before, after = (read_json(path / MODEL_CARD) for path in (folder / "finetuned", tmp_path / "refitted"))
    config = CountsConfig(**{name: after["counts"][name] for name in asdict(CONFIG)})
    assert config == CountsConfig(**{name: before["counts"][name] for name in asdict(CONFIG)})
    data = sequences.load(prepared)
    expected = term.build(trained_until(data, data.stop), config)
    found = load_checkpoint(tmp_path / "refitted").count_term
    assert all(torch.equal(value, expected.tensors()[name]) for name, value in found.tensors().items())
    assert len(found.targets) > len(load_checkpoint(folder / "finetuned").count_term.targets)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"counts": "all"}, "counts must be none, auto"),
        ({"counts": {"alfa": 1}}, "counts.alfa: unknown key"),
        ({"counts": {"kernel": "square root"}}, "kernel must be inverse, root, square or a number"),
        ({"counts": {"kernel": "\u00b2"}}, "kernel must be inverse, root, square or a number"),
        ({"counts": {"kernel": "9" * 400}}, "kernel must be inverse, root, square or a number up to 1"),
        ({"counts": {"smoothing": 0}}, "smoothing must be at least 1e-09"),
        ({"counts": "auto", "user_share": 0.5}, "user_share: .* set counts: none"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(FinetuneConfig, values, "finetune")
