from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from seqrec.__main__ import main
from seqrec.artifacts import CASES_SCHEMA, USERS_SCHEMA, VOCABULARY_SCHEMA
from seqrec.commands import registry as registry_command
from seqrec.config import ConfigError, CountsConfig, ModelConfig, RegisterConfig
from seqrec.counts.term import CountTerm
from seqrec.models.base import Catalogue
from seqrec.serving import http, onnx_graph
from seqrec.serving.events import Event, Shown, Store
from seqrec.serving.http import loaded
from seqrec.serving.onnx_graph import GraphRecommender
from seqrec.serving.recommender import Recommender
from seqrec.tracking import gate, registry, runs
from seqrec.tracking.runs import TrackingError
from seqrec.training.checkpoint import build, catalogue_files, load_checkpoint, save_counts, save_model

ITEMS = [f"i{number}" for number in range(1, 13)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What training and preparation leave: weights, card, vocabulary, users."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = ModelConfig(architecture="sasrec", options={"length": 6, "d_model": 8, "layers": 1})
    model = build(config, Catalogue(num_items=len(ITEMS), num_users=2, length=6))
    follows = CountTerm(  # item 1 is followed by 2, and so on
        offsets=torch.tensor([0, *range(len(ITEMS)), len(ITEMS) - 1]),
        targets=torch.arange(2, len(ITEMS) + 1, dtype=torch.int32),
        values=torch.linspace(1, 2, len(ITEMS) - 1),
        weights=torch.tensor([1.0, 0.5]),
        log_popularity=torch.zeros(len(ITEMS) + 1),
    )
    counts = save_counts(folder, follows, asdict(CountsConfig(events=2)))
    numbers = list(range(1, len(ITEMS) + 1))
    vocabulary = {"item": numbers, "item_id": ITEMS, "count": numbers}
    pq.write_table(pa.table(vocabulary, schema=VOCABULARY_SCHEMA), folder / "vocabulary.parquet")
    pq.write_table(pa.table({"user": [1, 2], "user_id": ["a", "b"]}, schema=USERS_SCHEMA), folder / "users.parquet")
    facts = {"model": "sasrec", "fingerprint": "f", "filter_seen": True, "counts": counts}
    save_model(folder, model, facts, catalogue_files(folder))
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return RegisterConfig(tracking_uri=f"sqlite:///{tmp_path_factory.mktemp('tracking')}/mlflow.db")


@pytest.fixture(scope="module")
def client(config):
    return runs.connect(config)


@pytest.fixture(scope="module")
def run(client, config):
    return runs.open_run(client, runs.experiment(client, config), "f", "sasrec")


@pytest.fixture(scope="module")
def model(client, run, folder):
    experiment = run.info.experiment_id
    client.create_logged_model(experiment, "sasrec", run.info.run_id)  # what a killed call leaves
    return registry.log_model(client, run, checkpoint=load_checkpoint(folder))


def files(model):
    return [path for path in Path(model.artifact_location).rglob("*") if path.is_file()]


def test_a_half_written_model_is_replaced_and_a_complete_one_is_kept(client, run, model, folder):
    (found,) = client.search_logged_models([run.info.experiment_id])

    assert found.model_id == model.model_id
    assert registry.log_model(client, run, checkpoint=load_checkpoint(folder)).model_id == model.model_id


def test_a_model_gets_its_graph_once_and_is_served_with_it(client, config, run, folder, monkeypatch, caplog):
    spare = client.create_logged_model(run.info.experiment_id, "spare", run.info.run_id)  # not the one of other tests
    shutil.copytree(folder, Path(spare.artifact_location.removeprefix("file://")) / registry.ARTIFACTS)
    export = onnx_graph.export_checkpoint

    def broken(*_):
        raise RuntimeError("no such operator\nand a long trace")

    monkeypatch.setattr(onnx_graph, "export_checkpoint", broken)
    registry.log_graph(client, spare, checkpoint=load_checkpoint(folder))
    assert "spare has no ONNX graph and is served by torch (RuntimeError: no such operator)" in caplog.text
    assert not isinstance(loaded(f"models:/{spare.model_id}", 0, config), GraphRecommender)

    monkeypatch.setattr(onnx_graph, "export_checkpoint", export)
    registry.log_graph(client, spare, checkpoint=load_checkpoint(folder))
    monkeypatch.setattr(onnx_graph, "export_checkpoint", broken)
    caplog.clear()
    registry.log_graph(client, spare, checkpoint=load_checkpoint(folder))
    assert not caplog.text
    served = loaded(f"models:/{spare.model_id}", 0, config)
    assert isinstance(served, GraphRecommender)
    assert served.recommend(["i1"]).items == Recommender.load(folder).recommend(["i1"]).items
    client.delete_logged_model(spare.model_id)


def test_nothing_in_the_model_is_a_pickle(model):
    assert not [path for path in files(model) if path.suffix in {".pkl", ".pickle", ".pt", ".pth", ".bin"}]
    assert "best.safetensors" in {path.name for path in files(model)}


def test_its_code_is_the_package_seqrec_alone(model):
    parts = [path.relative_to(model.artifact_location).parts for path in files(model) if path.suffix == ".py"]
    places = {"/".join(part[:2]) for part in parts if len(part) > 1}

    assert places == {"code/seqrec"}
    assert ("code", "seqrec", "models", "sasrec.py") in parts


def test_requirements_are_pinned_by_public_versions(model):
    (path,) = [path for path in files(model) if path.name == "requirements.txt"]
    pins = dict(line.split("==") for line in path.read_text().splitlines())

    assert set(pins) == set(registry.PACKAGES)
    assert pins["torch"] == torch.__version__.partition("+")[0]


CLEAN_PROCESS = """
import json, sys
import mlflow, pandas as pd
model = mlflow.pyfunc.load_model(sys.argv[1])
import seqrec
frame = pd.DataFrame({
    "history": [["i1", "i2"], ["i3", "not in the catalogue"], []],
    "k": [3, 2, 4],
    "user": ["a", None, "stranger"],
    "exclude": [[sys.argv[2]], [], ["i1"]],
})
print(json.dumps({
    "code": seqrec.__file__,
    "full": model.predict(frame).to_dict("list"),
    "bare": model.predict(frame[["history"]]).to_dict("list"),
}))
"""


def test_the_model_loads_in_a_clean_process_and_recommends_by_external_ids(model, folder, config, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["MLFLOW_TRACKING_URI"] = config.tracking_uri
    recommender = Recommender.load(folder)
    best = recommender.recommend(["i1", "i2"], user="a").items[0]
    command = [sys.executable, "-c", CLEAN_PROCESS, f"models:/{model.model_id}", best]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)

    assert Path(answer["code"]).is_relative_to(model.artifact_location)
    expected = [
        recommender.recommend(["i1", "i2"], 3, exclude=[best], user="a"),
        recommender.recommend(["i3", "not in the catalogue"], 2),
        recommender.recommend([], 4, exclude=["i1"], user="stranger"),
    ]
    assert answer["full"]["items"] == [row.items for row in expected]
    for scores, row in zip(answer["full"]["scores"], expected, strict=True):
        assert scores == pytest.approx(row.scores)
    assert answer["full"]["source"] == ["sasrec", "sasrec", "popularity"]
    assert answer["full"]["unknown"] == [0, 1, 0]
    assert answer["bare"]["items"][0] == recommender.recommend(["i1", "i2"]).items


def test_a_recommender_is_loaded_by_every_name_of_the_registry(client, run, model, folder, config, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    version = registry.create_version(client, "seqrec-loaded", model, {})
    client.set_registered_model_alias("seqrec-loaded", registry.CHAMPION, version.version)
    places = ["models:/seqrec-loaded@champion", "models:/seqrec-loaded/1", f"runs:/{run.info.run_id}/sasrec"]
    expected = Recommender.load(str(folder)).recommend(["i1", "i2"], user="a")

    for place in [*places, f"models:/{model.model_id}", folder]:
        assert Recommender.load(place, config).recommend(["i1", "i2"], user="a") == expected
    assert http.champion("loaded", config)[0]().recommend(["i1", "i2"], user="a") == expected
    for place in ("models:/seqrec-loaded/7", "models:/seqrec-loaded@candidates", "models:/never", "runs:/abc/sasrec"):
        with pytest.raises(TrackingError, match=f"{place} cannot be fetched"):
            Recommender.load(place, config)


def test_without_mlflow_a_registered_model_is_refused_and_a_folder_is_not(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.delitem(sys.modules, "seqrec.tracking.registry")
    monkeypatch.delattr("seqrec.tracking.registry")

    with pytest.raises(ValueError, match=r"models:/x@champion: mlflow is not installed"):
        Recommender.load("models:/x@champion")
    assert Recommender.load(folder).item_ids == ITEMS


def cases(*ranks):
    rows = [
        {"split": "valid", "user": user, "position": 3, "target": 1, "rank": float(rank), "ties": 0}
        for user, rank in enumerate(ranks, start=1)
    ]
    return pa.Table.from_pylist(rows, schema=CASES_SCHEMA)


def register(client, run, model, tmp_path, name, ranks, **tags):
    """Make another version as `create_version` does, from a copy of the model with weights of its own."""
    copy = client.create_logged_model(run.info.experiment_id, name, run.info.run_id, tags=dict(model.tags) | tags)
    path = tmp_path / "cases.parquet"
    pq.write_table(cases(*ranks), path)
    client.log_artifact(run.info.run_id, str(path), registry.REPORT)
    shared = {registry.SPLIT_TAG: "s", registry.FILTER_TAG: "1"}
    return registry.create_version(client, name, copy, shared)


def test_a_version_is_found_again_by_fingerprint_and_weights(client, run, model):
    first = registry.create_version(client, "again", model, {registry.SPLIT_TAG: "s"}, "as it was")
    again = registry.create_version(client, "again", model, {registry.SPLIT_TAG: "t"}, "as it is")

    assert again.version == first.version
    assert (again.tags[registry.SPLIT_TAG], again.description) == ("t", "as it is")


def test_an_alias_set_by_hand_is_respected_and_named(client, run, model, tmp_path, config):
    version = register(client, run, model, tmp_path, "by-hand", [1, 2])
    client.set_registered_model_alias("by-hand", registry.CHAMPION, version.version)

    decision = gate.promote(client, version, cases(1, 2), tmp_path, config)
    assert decision == gate.Decision(True, "the alias was set by hand", None)


def test_cases_that_differ_within_one_split_are_left_to_a_person(client, run, model, tmp_path, config):
    first = register(client, run, model, tmp_path, "differ", [1, 2])
    gate.promote(client, first, cases(1, 2), tmp_path, config)
    second = register(client, run, model, tmp_path, "differ", [1, 2], **{registry.WEIGHTS_TAG: "other"})

    decision = gate.promote(client, second, cases(1, 2, 3), tmp_path, config)
    assert not decision.promoted
    assert "not comparable with version 1: the two runs were evaluated on different cases" in decision.reason
    assert decision.reason.endswith("a person decides: registry promote --version 2")


@pytest.mark.parametrize(
    ("ranks", "promoted"),
    [
        ([1, 1, 1, 1], True),  # better for everyone
        ([2, 2, 2, 2], False),  # the same
        ([1, 4, 1, 4], False),  # better on average, but not for sure
    ],
)
def test_the_gate_asks_for_a_gain_beyond_doubt(client, run, model, tmp_path, config, ranks, promoted):
    name = f"gate-{'-'.join(map(str, ranks))}"
    first = register(client, run, model, tmp_path, name, [2, 2, 2, 2])
    gate.promote(client, first, cases(2, 2, 2, 2), tmp_path, config)
    second = register(client, run, model, tmp_path, name, [2, 2, 2, 2], **{registry.WEIGHTS_TAG: "other"})

    decision = gate.promote(client, second, cases(*ranks), tmp_path, config)
    assert decision.promoted == promoted
    assert int(registry.find_champion(client, name).version) == (2 if promoted else 1)
    stored = client.get_model_version(name, second.version).tags
    assert json.loads(stored[registry.GAIN_TAG]) == list(decision.gain)
    assert stored[registry.REASON_TAG] == decision.reason


def test_a_gain_is_not_paid_with_coverage_or_the_tail(client, run, model, tmp_path, config):
    name = "guarded"
    first = register(client, run, model, tmp_path, name, [2, 2, 2, 2])
    gate.promote(client, first, cases(2, 2, 2, 2), tmp_path, config)
    second = register(client, run, model, tmp_path, name, [2, 2, 2, 2], **{registry.WEIGHTS_TAG: "other"})
    for version, coverage in ((first, 0.5), (second, 0.4)):
        tags = gate.guard_tags({"valid/coverage@10": coverage, "valid/ndcg@10": 1.0})
        assert list(tags) == ["seqrec.valid/coverage_at_10"]
        client.set_model_version_tag(name, version.version, *next(iter(tags.items())))
    second = client.get_model_version(name, second.version)

    decision = gate.promote(client, second, cases(1, 1, 1, 1), tmp_path, config)
    assert not decision.promoted
    assert "valid/coverage@10 falls from 0.5000 to 0.4000" in decision.reason

    lenient = replace(config, max_loss=0.25)
    assert gate.promote(client, second, cases(1, 1, 1, 1), tmp_path, lenient).promoted


@pytest.mark.parametrize(("value", "allowed", "promoted"), [(0.2, False, False), (0.2, True, True), (0.3, False, True)])
def test_a_model_below_the_best_baseline_is_champion_only_if_that_is_allowed(
    client, run, model, tmp_path, config, value, allowed, promoted
):
    name = f"below-{10 * value:.0f}-{allowed}"
    tags = {gate.VALUE_TAG: str(value), **gate.baseline_tags("ease", 0.3)}
    version = register(client, run, model, tmp_path, name, [2, 2])
    for key, text in tags.items():
        client.set_model_version_tag(name, version.version, key, text)
    version = client.get_model_version(name, version.version)

    decision = gate.promote(client, version, cases(2, 2), tmp_path, replace(config, allow_below_baseline=allowed))
    assert decision.promoted == promoted
    assert (registry.find_champion(client, name) is not None) == promoted
    assert ("below the best baseline, ease (0.3000); register.allow_below_baseline" in decision.reason) != promoted


@pytest.mark.parametrize("first", ["better", "worse"])
def test_of_two_promotions_at_once_the_better_stays(client, run, model, tmp_path, config, monkeypatch, first):
    """While one is being decided, the whole promotion of the other passes."""
    name = f"race-{first}"
    old = register(client, run, model, tmp_path, name, [3, 3, 3, 3])
    gate.promote(client, old, cases(3, 3, 3, 3), tmp_path, config)
    versions = {}
    for number, (kind, ranks) in enumerate({"better": [1] * 4, "worse": [2] * 4}.items()):
        own = client.create_run(run.info.experiment_id)
        copy = client.create_logged_model(
            run.info.experiment_id, kind, own.info.run_id, tags={**model.tags, registry.WEIGHTS_TAG: str(number)}
        )
        path = tmp_path / "cases.parquet"
        pq.write_table(cases(*ranks), path)
        client.log_artifact(own.info.run_id, str(path), registry.REPORT)
        shared = {registry.SPLIT_TAG: "s", registry.FILTER_TAG: "1"}
        versions[kind] = (registry.create_version(client, name, copy, shared), cases(*ranks))
    second = "worse" if first == "better" else "better"
    decide, entered = gate._decide, []

    def deciding(*arguments):
        decision = decide(*arguments)
        if not entered:
            entered.append(True)
            gate.promote(client, *versions[second], tmp_path, config)
        return decision

    monkeypatch.setattr(gate, "_decide", deciding)
    decision = gate.promote(client, *versions[first], tmp_path, config)

    assert entered
    assert registry.find_champion(client, name).version == versions["better"][0].version
    assert decision.promoted == (first == "better")


def test_promotions_by_hand_are_audited_and_rolled_back(client, run, model, tmp_path, config, capsys):
    name = "seqrec-byhand"
    first = register(client, run, model, tmp_path, name, [2, 2])
    gate.promote(client, first, cases(2, 2), tmp_path, config)
    second = register(client, run, model, tmp_path, name, [2, 2], **{registry.WEIGHTS_TAG: "other"})
    settings = {"dataset": "byhand", "config": config}

    store = f"sqlite:///{tmp_path}/events.db"
    log_clicks(Store(store), {"1": (4, 1), "2": (4, 3)})
    registry_command.registry(["promote"], **settings, version=int(second.version), reason="a test", store=store)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("0.2500", "0.7500", "difference +0.5000, 95% interval"))
    assert registry.find_champion(client, name).version == second.version
    registry_command.registry(["rollback"], **settings)
    assert registry.find_champion(client, name).version == first.version
    withdrawn = client.get_model_version(name, second.version)
    decision = gate.promote(client, withdrawn, cases(1, 1), tmp_path, config)  # by far better, and measured once more
    assert (decision.promoted, decision.reason.split(";")[0]) == (False, "it was rolled back to version 1")

    registry_command.registry(["promote"], **settings, version=int(second.version))
    third = register(client, run, model, tmp_path, name, [2, 2], **{registry.WEIGHTS_TAG: "third"})
    registry_command.registry(["promote"], **settings, version=int(third.version))
    assert gate.promote(client, client.get_model_version(name, third.version), cases(1, 1), tmp_path, config).promoted
    for expected in (second, first):  # each one leads further back
        registry_command.registry(["rollback"], **settings)
        assert registry.find_champion(client, name).version == expected.version
    with pytest.raises(ConfigError, match="no champion before"):
        registry_command.registry(["rollback"], **settings)

    registry_command.registry(["show"], **settings)
    printed = " ".join(capsys.readouterr().out.split())
    assert "promote by hand: a test; click-through 0.7500 against 0.2500" in printed
    for entry in ("none -> 1: the first champion", "1 -> 2:", "2 -> 1: rollback by hand"):
        assert entry in printed


def versions_of(client, run, model, tmp_path, name, number):
    """Register so many versions, the first of them the champion; they differ in their weights alone."""
    found = [
        register(client, run, model, tmp_path, name, [2, 2, 2, 2], **{registry.WEIGHTS_TAG: f"weights {n}"})
        for n in range(number)
    ]
    registry.crown(client, found[0], None, "a test")
    return found


def champion_of(client, name):
    return int(registry.find_champion(client, name).version)


def stored(client, name):
    """Return all that the registry holds of a model."""
    versions = client.search_model_versions(f"name = '{name}'")
    found = client.get_registered_model(name)
    return found.tags, found.aliases, {version.version: version.tags for version in versions}


def test_to_promote_the_champion_is_nothing_to_do_and_keeps_the_way_back(client, run, model, tmp_path, config, caplog):
    name, settings = "seqrec-twice", {"dataset": "twice", "config": config}
    versions_of(client, run, model, tmp_path, name, 2)
    registry_command.registry(["promote"], **settings, version=2)
    before = stored(client, name)

    with caplog.at_level("INFO"):
        registry_command.registry(["promote"], **settings, version=2)
    assert "version 2 of seqrec-twice is the champion already: nothing to do" in caplog.text
    assert stored(client, name) == before
    registry_command.registry(["rollback"], **settings)
    assert champion_of(client, name) == 1


def test_a_rollback_leads_to_no_version_that_was_rolled_back_nor_round_in_a_circle(
    client, run, model, tmp_path, config
):
    name, settings = "seqrec-circle", {"dataset": "circle", "config": config}
    versions_of(client, run, model, tmp_path, name, 3)
    for version in (2, 3, 1):  # the first one again
        registry_command.registry(["promote"], **settings, version=version)

    for expected in (3, 2):
        registry_command.registry(["rollback"], **settings)
        assert champion_of(client, name) == expected
    with pytest.raises(ConfigError, match="no champion before"):
        registry_command.registry(["rollback"], **settings)
    registry_command.registry(["promote"], **settings, version=3)  # whoever promotes it wants it
    client.delete_model_version(name, "2")
    with pytest.raises(ConfigError, match="rollback: version 2 was deleted"):
        registry_command.registry(["rollback"], **settings)


def test_of_two_promotions_by_hand_the_second_starts_from_the_first(client, run, model, tmp_path, config, monkeypatch):
    """While one waits for its turn, the other passes."""
    name, settings = "seqrec-hands", {"dataset": "hands", "config": config}
    versions_of(client, run, model, tmp_path, name, 3)
    registering = runs.registering

    @contextmanager
    def late(*arguments):
        monkeypatch.setattr(registry_command, "registering", registering)
        registry_command.registry(["promote"], **settings, version=2)
        with registering(*arguments):
            yield

    monkeypatch.setattr(registry_command, "registering", late)
    registry_command.registry(["promote"], **settings, version=3)

    assert champion_of(client, name) == 3
    assert client.get_model_version(name, "3").tags[registry.PREVIOUS_TAG] == "2"


@pytest.mark.parametrize("ranks", [[1, 1, 1, 1], [2, 2, 2, 2]])
def test_a_promotion_by_hand_is_seen_by_the_gate_that_is_deciding(
    client, run, model, tmp_path, config, monkeypatch, ranks
):
    name = f"seqrec-between-{ranks[0]}"
    _, second, _ = versions_of(client, run, model, tmp_path, name, 3)
    decide, entered = gate._decide, []

    def deciding(*arguments):
        decision = decide(*arguments)
        if not entered:
            entered.append(True)
            settings = {"dataset": name.removeprefix("seqrec-"), "config": config}
            registry_command.registry(["promote"], **settings, version=3)
        return decision

    monkeypatch.setattr(gate, "_decide", deciding)
    decision = gate.promote(client, second, cases(*ranks), tmp_path, config)

    assert "over version 3" in decision.reason
    assert champion_of(client, name) == (2 if decision.promoted else 3)
    assert client.get_model_version(name, "3").tags[registry.PREVIOUS_TAG] == "1"


def log_clicks(store, versions):
    """Log one answer to each of so many users of a version, and a click of so many of them."""
    for version, (users, clicked) in versions.items():
        names = [f"{version}-{number}" for number in range(users)]
        store.show([Shown(recommendation_id=name, user=name, version=version, items=["i1"], at=9.0) for name in names])
        store.add(
            [
                Event(event_id=name, user=name, item="i1", kind="buy", at=9.5, recommendation_id=name)
                for name in names[:clicked]
            ]
        )


@pytest.mark.parametrize("url", ["sqlite:///no/such/folder/events.db", "sqlite://"])
def test_a_store_that_knows_nothing_keeps_nobody_from_promoting(client, run, model, tmp_path, config, url, monkeypatch):
    monkeypatch.setenv("SEQREC_STORE", url)
    first = register(client, run, model, tmp_path, "seqrec-blind", [2, 2])
    gate.promote(client, first, cases(2, 2), tmp_path, config)

    second = register(client, run, model, tmp_path, "seqrec-blind", [2, 2], **{registry.WEIGHTS_TAG: "other"})
    registry_command.registry(["promote"], dataset="blind", config=config, version=int(second.version))

    audit = client.get_registered_model("seqrec-blind").tags.values()
    assert any(entry.endswith("promote by hand") for entry in audit)


def test_show_marks_candidate_and_champion(client, run, model, tmp_path, config, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", config.tracking_uri)
    monkeypatch.setenv("COLUMNS", "200")
    name = "seqrec-mine"
    first = register(client, run, model, tmp_path, name, [2, 2])
    second = register(client, run, model, tmp_path, name, [2, 2], **{registry.WEIGHTS_TAG: "other"})
    gate.promote(client, first, cases(2, 2), tmp_path, config)

    def shown():
        assert main(["registry", "show", "--dataset", "mine"]) == 0
        lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
        return [(cells[1].strip(), cells[4].strip()) for cells in lines]

    client.set_registered_model_alias(name, registry.CANDIDATE, second.version)
    assert shown() == [("1", "champion"), ("2", "candidate")]
    client.set_registered_model_alias(name, registry.CANDIDATE, first.version)
    assert shown() == [("1", "candidate, champion"), ("2", "")]


@pytest.mark.parametrize(
    ("actions", "dataset", "message"),
    [
        (["promote"], "bad", "no version 0"),
        (["rollback"], "bad", "no champion before"),
        (["delete"], "bad", "one of show, promote, rollback expected"),
        (["show"], "unheard-of", "seqrec-unheard-of is not registered"),
    ],
)
def test_what_cannot_be_done_by_hand_is_refused(client, run, model, tmp_path, config, actions, dataset, message):
    version = register(client, run, model, tmp_path, "seqrec-bad", [2, 2])
    gate.promote(client, version, cases(2, 2), tmp_path, config)

    with pytest.raises(ConfigError, match=message):
        registry_command.registry(actions, dataset=dataset, config=config)
