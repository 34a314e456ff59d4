"""A champion meets a candidate on a log that has grown since: it is measured on the new cases, or a person decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import prepare_rows, save, synthetic_rows

from seqrec.artifacts import CASES, MODEL_CARD, REFIT, SPLIT_CARD, VOCABULARY, WEIGHTS, read_json, sha256, write_json
from seqrec.config import CountsConfig, EvaluateConfig
from seqrec.data import sequences as prepared_data
from seqrec.evaluation import metrics, results
from seqrec.evaluation.ranking import model_scorer
from seqrec.serving.recommender import Recommender
from seqrec.tracking import gate, other_catalogue, registry, runs
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.held_out import split_of

LOG = synthetic_rows(users=60, items=40, events=20)
OLD = [(user, item, time) for user, item, time in LOG if time < 1_014_000 and user not in ("u5", "u6")]
# The log has grown: events, two users, and an item that comes before all others, so that every number is another one.
NEW = [
    *LOG,
    *((f"u{n}", "a-new-item", 1_000_900 + 1000 * (12 + n % 6)) for n in range(30)),
    *(("of new items only", "a-new-item", 1_016_000 + n) for n in range(6)),
]


@pytest.fixture(scope="module", params=["temporal"])
def grown(tmp_path_factory, request):
    """The prepared dataset of the champion, and that of today."""
    folder = tmp_path_factory.mktemp("grown")
    config = {"min_item_events": 1, "protocol": request.param, "valid_share": 0.1, "test_share": 0.1}
    return [prepare_rows(folder / name, rows, **config) for name, rows in (("old", OLD), ("new", NEW))]


COUNTED = {"counts": CountsConfig(alpha=0.5, events=3, popularity=-0.1)}


@pytest.mark.parametrize(
    ("grown", "architecture", "options"),
    [
        ("LOO-full", "sasrec", COUNTED),
        ("temporal", "sasrec", COUNTED),
        ("temporal", "bert4rec", {"options": {"objective": "cloze"}}),
        ("temporal", "tisasrec", {}),  # reads times
        ("temporal", "flash4rec", {"options": {"request_time": True}}),  # reads the time of the request, and the user
        ("temporal", "mfbpr", {}),  # reads nothing else
    ],
    indirect=["grown"],
)
def test_a_champion_ranks_the_new_cases_as_it_would_serve_them(grown, tmp_path, architecture, options):
    old, new = grown
    recommender = Recommender.load(save(architecture, old, tmp_path, filter_seen=False, **options))

    found = other_catalogue.measured(load_checkpoint(tmp_path), new, filter_seen=False)

    assert (found.new_items, found.new_users) == (1, 3)
    data, shown, hits = prepared_data.load(new), set(), 0
    items, users = prepared_data.read_items(new), prepared_data.read_users(new)
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


def trained_before(old, new, folder):
    """A model of the old dataset, and the cases of the new one as it ranks them."""
    card = {"split": split_of(read_json(old / SPLIT_CARD)), "model": "sasrec"}
    checkpoint = load_checkpoint(save("sasrec", old, folder, **card))
    return checkpoint, other_catalogue.measured(checkpoint, new, filter_seen=True).cases


def crowned(client, config, name, checkpoint):
    """Register the checkpoint as the champion of the old dataset; return its version."""
    run = client.create_run(runs.experiment(client, config), tags={runs.FINGERPRINT: name})
    model = registry.log_model(client, run, checkpoint=checkpoint)
    version = registry.create_version(client, name, model, {registry.SPLIT_TAG: "old", registry.FILTER_TAG: "1"})
    registry.crown(client, version, None, "a test")
    return version


def challenged(client, config, champion, new, cases, rank):
    """Let a candidate that has this rank in all cases of the new dataset meet the champion; return the decision."""
    ranks = pa.array(np.full(len(cases), rank), cases.schema.field("rank").type)
    cases = cases.set_column(cases.column_names.index("rank"), cases.schema.field("rank"), ranks)
    tags = {registry.SPLIT_TAG: "new", registry.FILTER_TAG: "1"}
    version = client.create_model_version(champion.name, champion.source, tags=tags)
    return gate.promote(client, version, cases, new, config)


@pytest.mark.parametrize(("rank", "promoted"), [(1, True), (30, False)])
def test_a_candidate_on_a_grown_log_is_compared_with_the_champion(grown, client, config, tmp_path, rank, promoted):
    old, new = grown
    checkpoint, cases = trained_before(old, new, tmp_path)
    champion = crowned(client, config, f"seqrec-{rank}", checkpoint)

    decision = challenged(client, config, champion, new, cases, rank)

    expected = metrics.ndcg(np.array([rank]), 10)[0] - metrics.ndcg(cases["rank"].to_numpy(), 10).mean()
    assert decision.gain.mean == pytest.approx(expected)
    assert decision.promoted == promoted
    assert int(registry.find_champion(client, champion.name).version) == (2 if promoted else 1)
    words = "over version 1 (measured with another split), measured again on these cases (1 items and 3 users are new"
    assert words in decision.reason


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
    "config.json: models.sasrec.options: heads: a width": lambda folder: write_card(folder, options={"d_model": 15}),
    "none of the items": forget_items,
}


@pytest.mark.parametrize("reason", [*REASONS, "best.safetensors"])
def test_a_champion_that_cannot_be_measured_again_stays_until_a_person_decides(grown, client, config, tmp_path, reason):
    old, new = grown
    checkpoint, cases = trained_before(old, new, tmp_path)
    REASONS.get(reason, lambda _: None)(tmp_path)
    champion = crowned(client, config, "seqrec-" + "".join(filter(str.isalpha, reason)), checkpoint)
    if reason == WEIGHTS:
        logged = client.get_logged_model(champion.source.removeprefix("models:/"))
        (Path(logged.artifact_location.removeprefix("file://")) / registry.ARTIFACTS / WEIGHTS).unlink()

    decision = challenged(client, config, champion, new, cases, 1)

    assert not decision.promoted
    assert decision.gain is None
    assert reason in decision.reason
    assert decision.reason.startswith("not comparable with version 1 (measured with another split): ")
    assert decision.reason.endswith("; to promote it anyway: python -m seqrec registry promote --version 2")
    assert int(registry.find_champion(client, champion.name).version) == 1
