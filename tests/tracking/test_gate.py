"""A champion meets a candidate on a log that has grown since: it is measured on the new cases, or a person decides."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support import prepare_rows, run, save, synthetic_rows

from seqrec.artifacts import CASES, MODEL_CARD, REFIT, SPLIT_CARD, VOCABULARY, WEIGHTS, read_json, sha256, write_json
from seqrec.config import CountsConfig, EvaluateConfig, RegisterConfig
from seqrec.data import sequences as prepared_data
from seqrec.evaluation import results
from seqrec.evaluation.ranking import model_scorer
from seqrec.serving.recommender import Recommender
from seqrec.stages.baselines import baselines
from seqrec.stages.evaluate import evaluate
from seqrec.stages.register import register
from seqrec.tracking import gate, other_catalogue, registry, runs
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.held_out import split_of

EVALUATE = EvaluateConfig(top_k=10, bootstrap=100)
LOG = synthetic_rows(users=60, items=40, events=20)
OLD = [(user, item, time) for user, item, time in LOG if time < 1_014_000 and user not in ("u5", "u6")]
# The log has grown: events, two users, and an item that comes before all others, so that every number is another one.
NEW = [
    *LOG,
    *((f"u{n}", "a-new-item", 1_000_900 + 1000 * (12 + n % 6)) for n in range(30)),
    *(("of new items only", "a-new-item", 1_016_000 + n) for n in range(6)),
]
SPLITS = {"temporal": {"protocol": "temporal", "valid_share": 0.1, "test_share": 0.1}, "LOO-full": {}}


@pytest.fixture(scope="module", params=SPLITS)
def grown(tmp_path_factory, request):
    """The prepared dataset of the champion, and that of today."""
    folder = tmp_path_factory.mktemp("grown")
    config = {"min_item_events": 1, **SPLITS[request.param]}
    return [prepare_rows(folder / name, rows, **config) for name, rows in (("old", OLD), ("new", NEW))]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracking")
    return RegisterConfig(tracking_uri=f"sqlite:///{folder}/mlflow.db", graph=False)


@pytest.fixture(scope="module")
def client(config):
    return runs.connect(config)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("sasrec", {"counts": CountsConfig(alpha=0.5, events=3, popularity=-0.1)}),
        ("bert4rec", {"options": {"objective": "cloze"}}),
        ("tisasrec", {}),  # reads times
        ("flash4rec", {"options": {"request_time": True}}),  # reads the time of the request, and the user
        ("mfbpr", {}),  # reads nothing else
    ],
)
def test_a_champion_ranks_the_new_cases_as_it_would_serve_them(grown, tmp_path, architecture, options):
    old, new = grown
    recommender = Recommender.load(save(architecture, old, tmp_path, filter_seen=False, **options))

    found = other_catalogue.measured(load_checkpoint(tmp_path), new, filter_seen=False)

    assert (found.new_items, found.new_users) == (1, 3)
    data, shown, hits = prepared_data.load(new), set(), 0
    items, users = prepared_data.read_vocabulary(new)[0], prepared_data.read_users(new)
    for case in found.cases.to_pylist():
        first = int(data.start[case["user"] - 1])
        events = range(first, first + case["position"])
        history = [items[int(data.items[event]) - 1] for event in events]
        times = [int(data.times[event]) for event in events]
        at = float(data.times[first + case["position"]])
        served = recommender.recommend(history, user=users[case["user"] - 1], times=times, at=at).items
        shown |= set(served)
        if case["ties"] == 0:  # popular items that a history without a known one gets may tie
            hits += case["rank"] <= 10
            assert served[int(case["rank"]) - 1 :][:1] == [items[case["target"] - 1]] or case["rank"] > 10
            assert items[case["target"] - 1] not in served or case["rank"] <= 10
    assert hits > 5
    assert found.values["valid/coverage@10"] == pytest.approx(len(shown) / len(items))


@pytest.mark.parametrize("filter_seen", [True, False])
def test_on_its_own_dataset_a_model_is_measured_as_evaluate_does(grown, tmp_path, filter_seen):
    new = grown[1]
    checkpoint = load_checkpoint(save("sasrec", new, tmp_path / "model"))
    scorer = model_scorer(checkpoint.model)
    config = EvaluateConfig(top_k=10, bootstrap=100)
    values = results.report(scorer, prepared_data.load(new), tmp_path, config, {}, filter_seen=filter_seen)

    found = other_catalogue.measured(checkpoint, new, filter_seen=filter_seen)

    assert found.cases == pq.read_table(tmp_path / CASES, filters=[("split", "==", "valid")])
    assert list(found.values) == list(gate.GUARDED)
    assert found.values == pytest.approx({name: values[name] for name in gate.GUARDED})


QUALITY = {"good": {"epochs": 12, "learning_rate": 1e-2}, "bad": {"epochs": 1, "learning_rate": 1e-5}}


@pytest.fixture(scope="module")
def projects(grown, tmp_path_factory):
    """What the stages before register write: of good and bad models, on the old and on the new dataset."""
    folders = {}
    for name, prepared in zip(("old", "new"), grown, strict=True):
        reports = tmp_path_factory.mktemp(name) / "reports"
        places = {"data": prepared.parent, "artifacts": reports.parent / "artifacts", "reports": reports}
        baselines(sequences=prepared, **places, config=EVALUATE)
        for kind, settings in QUALITY.items():
            root = folders[name, kind] = tmp_path_factory.mktemp(f"{name}-{kind}")
            shutil.copytree(prepared.parent, root / "data")
            for folder in ("reports", "artifacts"):
                shutil.copytree(reports.parent / folder, root / folder)
            write_json(root / "data/source.json", {"source": "synthetic", "licence": "CC0"})
            out = root / "artifacts/sasrec"
            run(prepared, out, warmup_steps=1, **settings)
            places = {"sequences": prepared, "checkpoint": out / "finetuned", "report": root / "reports/sasrec"}
            evaluate(model="sasrec", config=EVALUATE, **places)
    return folders


@pytest.mark.parametrize("grown", ["temporal"], indirect=True)
@pytest.mark.parametrize(("before", "now", "promoted"), [("good", "bad", False), ("bad", "good", True)])
def test_a_candidate_on_a_grown_log_is_compared_with_the_champion(
    projects, tmp_path, monkeypatch, before, now, promoted
):
    monkeypatch.chdir(tmp_path)
    for place in (projects["old", before], projects["new", now]):
        values = register(
            leaderboard=["sasrec"],
            artifacts=place / "artifacts",
            reports=place / "reports",
            sequences=place / "data/sequences",
            data=place / "data",
            params={"dataset": "synthetic"},
            config=RegisterConfig(allow_below_baseline=True, graph=False, max_loss=1.0),
        )

    outcome = read_json(projects["new", now] / "reports/leaderboard.json")["registry"]
    assert (outcome["version"], outcome["promoted"]) == (2, promoted)
    champion = registry.find_champion(runs.connect(RegisterConfig()), "seqrec-synthetic")
    assert int(champion.version) == (2 if promoted else 1)
    gain = values["gain/valid/ndcg@10/low"], values["gain/valid/ndcg@10/high"]
    assert gain[0] > 0 if promoted else gain[1] < 0
    expected = (
        "over version 1 (measured with another split), measured again on these cases (1 items and 3 users are new"
    )
    assert expected in outcome["reason"]


def registered(client, config, name, checkpoint, split, cases):
    """Register the checkpoint as `register` does, with its cases; return the version."""
    run = client.create_run(runs.experiment(client, config), tags={runs.FINGERPRINT: f"{name} {split}"})
    model = registry.log_model(client, run, checkpoint=checkpoint)
    client.log_artifact(run.info.run_id, str(cases), registry.REPORT)
    return registry.create_version(client, name, model, {registry.SPLIT_TAG: split, registry.FILTER_TAG: "1"})


def write_card(folder, **changes):
    write_json(folder / MODEL_CARD, read_json(folder / MODEL_CARD) | changes)


def forget_items(folder):
    """Give the items of a model other ids."""
    table = pq.read_table(folder / VOCABULARY)
    other = table.set_column(1, table.schema.field(1), [[f"other {n}" for n in range(len(table))]])
    pq.write_table(other, folder / VOCABULARY)
    files = read_json(folder / MODEL_CARD)["files"]
    write_card(folder, files=files | {VOCABULARY: sha256(folder / VOCABULARY)})


REASONS = {
    "its model card does not name the split": lambda folder: write_card(folder, split={}),
    "its weights were refitted on events that may now be held out": lambda folder: write_card(folder, **{REFIT: {}}),
    "it was trained under prepare.protocol RATIO-full": lambda folder: write_card(
        folder, split=read_json(folder / MODEL_CARD)["split"] | {"protocol": "RATIO-full"}
    ),
    "config.json: models.sasrec.options: heads: d_model 15": lambda folder: write_card(folder, options={"d_model": 15}),
}


@pytest.mark.parametrize("reason", [*REASONS, "none of the items", "best.safetensors"])
@pytest.mark.parametrize("grown", ["temporal"], indirect=True)
def test_a_champion_that_cannot_be_measured_again_stays_until_a_person_decides(grown, client, config, tmp_path, reason):
    old, new = grown
    name = "seqrec-" + "".join(letter for letter in reason if letter.isalpha())
    card = {"split": split_of(read_json(old / SPLIT_CARD))}
    champion = load_checkpoint(save("sasrec", old, tmp_path / "old", **card))
    candidate = load_checkpoint(save("sasrec", new, tmp_path / "new"))
    REASONS.get(reason, lambda _: None)(champion.folder)
    if reason == "none of the items":
        forget_items(champion.folder)
    table = other_catalogue.measured(candidate, new, filter_seen=True).cases
    pq.write_table(table, tmp_path / CASES)
    first = registered(client, config, name, champion, "old", tmp_path / CASES)
    registry.crown(client, first, None, "a test")
    if reason == WEIGHTS:
        logged = client.get_logged_model(first.source.removeprefix("models:/"))
        (Path(logged.artifact_location.removeprefix("file://")) / registry.ARTIFACTS / WEIGHTS).unlink()
    better = table.set_column(table.column_names.index("rank"), "rank", [np.ones(len(table))]).cast(table.schema)
    second = registered(client, config, name, candidate, "new", tmp_path / CASES)
    decision = gate.promote(client, second, better, new, config)

    assert not decision.promoted
    assert decision.gain is None
    assert reason in decision.reason
    assert decision.reason.startswith("not comparable with version 1 (measured with another split): ")
    assert decision.reason.endswith("; to promote it anyway: python -m seqrec registry promote --version 2")
    assert int(registry.find_champion(client, name).version) == 1
