from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from support import case_table, save

from seqrec.commands import registry as registry_command
from seqrec.config import ConfigError, CountsConfig, ServeConfig
from seqrec.serving import http
from seqrec.serving.events import Event, Shown, Store
from seqrec.serving.http import loaded
from seqrec.serving.onnx_engine import OnnxEngine
from seqrec.serving.recommender import Recommender, located
from seqrec.stages.register import exporting
from seqrec.tracking import gate, registry, runs
from seqrec.tracking.runs import TrackingError
from seqrec.training.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def folder(prepared, tmp_path_factory):
    """What training leaves: weights, counts, card, vocabulary, users."""
    counts = CountsConfig(alpha=0.5, events=2)
    card = {"model": "sasrec", "fingerprint": "f"}
    return save("sasrec", prepared, tmp_path_factory.mktemp("model"), counts, {"layers": 1}, **card)


@pytest.fixture(scope="module")
def run(client, config):
    return runs.open_run(client, runs.experiment(client, config), "f", "sasrec.v2")  # a dot, which models do not take


@pytest.fixture(scope="module")
def model(client, run, folder):
    experiment = run.info.experiment_id
    client.create_logged_model(experiment, "sasrec", run.info.run_id)  # what a killed call leaves
    return registry.log_model(client, run, checkpoint=load_checkpoint(folder))


def test_a_half_written_model_is_replaced_and_a_complete_one_is_kept(client, run, model, folder):
    (found,) = client.search_logged_models([run.info.experiment_id])

    assert found.model_id == model.model_id
    assert registry.log_model(client, run, checkpoint=load_checkpoint(folder)).model_id == model.model_id


def test_a_model_gets_its_graph_once_and_is_served_with_it(client, config, run, folder, tmp_path, monkeypatch, caplog):
    spare = client.create_logged_model(run.info.experiment_id, "spare", run.info.run_id)  # not the one of other tests
    shutil.copytree(folder, Path(spare.artifact_location.removeprefix("file://")) / registry.ARTIFACTS)
    with exporting(folder) as export:
        export(tmp_path / "graph")
    upload, parts = client.log_model_artifacts, []

    def broken(_):
        raise RuntimeError("no such operator\nand a long trace")

    def written(target):
        shutil.copytree(tmp_path / "graph", target)

    def killed(model_id, part):
        if parts:
            raise KeyboardInterrupt
        parts.append(part)
        upload(model_id, part)

    def served():
        return loaded(f"models:/{spare.model_id}", config, ServeConfig())

    registry.log_graph(client, spare, broken)
    assert "spare has no ONNX graph and is served by torch (RuntimeError: no such operator)" in caplog.text
    monkeypatch.setattr(client, "log_model_artifacts", killed)
    with pytest.raises(KeyboardInterrupt):
        registry.log_graph(client, spare, written)
    monkeypatch.setattr(client, "log_model_artifacts", upload)
    assert not isinstance(served().engine, OnnxEngine)

    registry.log_graph(client, spare, written)
    caplog.clear()
    registry.log_graph(client, spare, broken)  # never called, for there is one
    assert not caplog.text
    with_graph = served()
    assert isinstance(with_graph.engine, OnnxEngine)
    assert with_graph.recommend(["i1"]).items == Recommender.load(folder).recommend(["i1"]).items
    place = with_graph.engine.folder
    del with_graph
    assert not place.exists()
    client.delete_logged_model(spare.model_id)


def test_nothing_in_the_model_is_a_pickle_and_its_requirements_are_pinned_by_public_versions(model):
    files = [path for path in Path(model.artifact_location).rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in {".pkl", ".pickle", ".pt", ".pth", ".bin"}]
    assert "best.safetensors" in {path.name for path in files}

    (path,) = [path for path in files if path.name == "requirements.txt"]
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
    "user": ["u1", None, "stranger"],
    "exclude": [[sys.argv[2]], [], ["i1"]],
    "at": [1.5e9, None, None],
})
times = [{"history": ["i1", "i2"], "times": times, "at": at} for times in ([1, 2], [1.5, 2.5]) for at in (3, 3.5)]
print(json.dumps({
    "code": seqrec.__file__,
    "full": model.predict(frame).to_dict("list"),
    "bare": model.predict(frame[["history"]]).to_dict("list"),
    "timed": [model.predict(pd.DataFrame([row]))["items"][0] for row in times],
}))
"""


def test_the_model_loads_in_a_clean_process_and_recommends_by_external_ids(model, folder, config, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["MLFLOW_TRACKING_URI"] = config.tracking_uri
    recommender = Recommender.load(folder)
    best = recommender.recommend(["i1", "i2"], user="u1").items[0]
    command = [sys.executable, "-c", CLEAN_PROCESS, f"models:/{model.model_id}", best]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "extra inputs" not in done.stderr  # MLflow leaves out what the signature does not name
    answer = json.loads(done.stdout)

    assert Path(answer["code"]).is_relative_to(model.artifact_location)
    expected = [
        recommender.recommend(["i1", "i2"], 3, exclude=[best], user="u1"),
        recommender.recommend(["i3", "not in the catalogue"], 2),
        recommender.recommend([], 4, exclude=["i1"], user="stranger"),
    ]
    assert answer["full"]["items"] == [row.items for row in expected]
    for scores, row in zip(answer["full"]["scores"], expected, strict=True):
        assert scores == pytest.approx(row.scores)
    assert answer["full"]["source"] == ["sasrec", "sasrec", "popularity"]
    assert answer["full"]["unknown"] == [0, 1, 0]
    plain = recommender.recommend(["i1", "i2"]).items
    assert answer["bare"]["items"][0] == plain
    assert answer["timed"] == [plain] * 4


def test_a_recommender_is_loaded_by_every_name_of_the_registry(client, run, model, folder, config):
    version = registry.create_version(client, "seqrec-loaded", model, {})
    client.set_registered_model_alias("seqrec-loaded", registry.CHAMPION, version.version)
    places = ["models:/seqrec-loaded@champion", "models:/seqrec-loaded/1", f"runs:/{run.info.run_id}/sasrec_v2"]
    expected = Recommender.load(str(folder)).recommend(["i1", "i2"], user="u1")

    for place in [*places, f"models:/{model.model_id}", folder]:
        assert Recommender.load(place, config).recommend(["i1", "i2"], user="u1") == expected
    for place in ("models:/seqrec-loaded/7", "models:/seqrec-loaded@candidates", "models:/never", "runs:/abc/sasrec"):
        with pytest.raises(TrackingError, match=f"{place} (is not in|cannot be fetched)"):
            Recommender.load(place, config)
    with pytest.raises(ValueError, match=r"^models:/seqrec-loaded/1 is odd"), located(places[1], config) as place:
        raise ValueError(f"{place} is odd")
    with pytest.raises(TrackingError, match=r"never/1 is not in .*registry show .* versions of .*\bloaded\b"):
        Recommender.load("models:/never/1", config)
    mistyped = replace(config, tracking_uri=f"sqlite:///{folder}/mistyped.db")
    with pytest.raises(TrackingError, match=r"register\.tracking_uri: there is no file .*mistyped\.db, which"):
        Recommender.load("models:/loaded/1", mistyped)
    assert not (folder / "mistyped.db").exists()
    load, champion = http._served("loaded", config, ServeConfig())
    assert champion() == str(version.version)
    client.delete_registered_model_alias("seqrec-loaded", registry.CHAMPION)  # before the service has loaded it
    assert load().recommend(["i1", "i2"], user="u1") == expected


def test_an_alias_is_served_as_the_version_that_holds_it(client, model, config, caplog):
    version = registry.create_version(client, "seqrec-alias", model, {})
    for alias in (registry.CHAMPION, "newest"):
        client.set_registered_model_alias("seqrec-alias", alias, version.version)
    uri = "models:/seqrec-alias@newest"

    _, served_version = http._served("alias", config, ServeConfig(saved=uri))
    assert served_version() == "1"
    with pytest.raises(ConfigError, match="candidate: models:/seqrec-alias/1 is the champion itself"):
        http._candidate(config, ServeConfig(candidate="models:/seqrec-alias/1"), champion_version="1")
    assert http._candidate(config, ServeConfig(candidate=uri), champion_version="0").current[1] == "1"
    for candidate in (uri, "models:/seqrec-alias@none"):  # an alias moves, so the service starts without it
        assert http._candidate(config, ServeConfig(candidate=candidate), champion_version="1") is None
    _, mistyped = http._served("allias", config, ServeConfig())
    assert mistyped() == ""
    named = next(line for line in caplog.messages if line.startswith("no model of allias is the champion"))
    assert "alias" in named.partition("registered of ")[2].split(", ")


def test_without_mlflow_a_registered_model_is_refused_and_a_folder_is_not(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.delitem(sys.modules, "seqrec.tracking.registry")
    monkeypatch.delattr("seqrec.tracking.registry")

    with pytest.raises(ValueError, match=r"models:/x@champion: mlflow is not installed"):
        Recommender.load("models:/x@champion")
    assert Recommender.load(folder).recommend(["i1"]).source == "sasrec"


class Registered:
    """A registered model of a test's own, whose versions differ in run, cases and weights."""

    def __init__(self, client, run, model, config, folder, dataset):
        self.client, self.config, self.folder = client, config, folder
        self.dataset, self.name = dataset, f"seqrec-{dataset}"
        self.experiment, self.model_tags = run.info.experiment_id, dict(model.tags)

    def version(self, *ranks, **tags):
        """Make another version as `register` does, with these validation ranks."""
        run_id = self.client.create_run(self.experiment).info.run_id
        own = self.model_tags | {registry.WEIGHTS_TAG: run_id}
        copy = self.client.create_logged_model(self.experiment, self.dataset, run_id, tags=own)
        pq.write_table(case_table(*ranks), self.folder / "cases.parquet")
        self.client.log_artifact(run_id, str(self.folder / "cases.parquet"), registry.REPORT)
        shared = {registry.SPLIT_TAG: "s", registry.FILTER_TAG: "1"}
        return registry.create_version(self.client, self.name, copy, shared | tags)

    def versions(self, number):
        """Make so many versions, the first of them the champion."""
        found = [self.version(2, 2, 2, 2) for _ in range(number)]
        registry.crown(self.client, found[0], None, "a test")
        return found

    def promote(self, version, *ranks, **changes):
        version = self.client.get_model_version(self.name, version.version)
        return gate.promote(self.client, version, case_table(*ranks), self.folder, replace(self.config, **changes))

    def by_hand(self, action, version=0, **more):
        registry_command.registry(action, dataset=self.dataset, config=self.config, version=version, **more)

    def champion(self):
        found = registry.find_champion(self.client, self.name)
        return found and int(found.version)

    def champion_history(self):
        return registry.champion_history(self.client.get_registered_model(self.name))

    def tags(self, version):
        return self.client.get_model_version(self.name, str(version)).tags

    def stored(self):
        """Return all that the registry holds of the model."""
        versions = self.client.search_model_versions(f"name = '{self.name}'")
        found = self.client.get_registered_model(self.name)
        return found.tags, found.aliases, {version.version: version.tags for version in versions}


@pytest.fixture
def own(client, run, model, config, tmp_path, request):
    return Registered(client, run, model, config, tmp_path, re.sub(r"\W+", "-", request.node.name))


def test_a_version_is_found_again_by_fingerprint_and_weights(client, run, model):
    first = registry.create_version(client, "again", model, {registry.SPLIT_TAG: "s"}, "as it was")
    again = registry.create_version(client, "again", model, {registry.SPLIT_TAG: "t"}, "as it is")

    assert again.version == first.version
    copy = client.create_logged_model(run.info.experiment_id, "copy", run.info.run_id, tags=model.tags)
    assert registry.create_version(client, "again", copy, {}).version != first.version
    client.delete_logged_model(copy.model_id)
    assert (again.tags[registry.SPLIT_TAG], again.description) == ("t", "as it is")


def test_an_alias_set_by_hand_is_respected_and_named(own):
    version = own.version(1, 2)
    own.client.set_registered_model_alias(own.name, registry.CHAMPION, version.version)

    assert own.promote(version, 1, 2) == gate.Decision(True, "the alias was set by hand", None)


def test_a_refit_whose_origin_was_deleted_is_an_error_that_says_what_to_do(own):
    origin, refit = own.version(1, 2), own.version(1, 1)
    own.client.set_model_version_tag(own.name, refit.version, registry.REFIT_TAG, str(origin.version))
    own.client.set_registered_model_alias(own.name, registry.CHAMPION, refit.version)
    own.client.delete_model_version(own.name, origin.version)

    with pytest.raises(TrackingError, match=r"version 1 of .*, version 2, was refitted, was deleted: promote another"):
        own.promote(own.version(1, 3), 1, 3)


def test_a_champion_whose_cases_are_gone_is_an_error_that_says_what_to_do(own):
    version = own.version(1, 2)
    own.promote(version, 1, 2)
    (cases,) = Path(own.client.get_run(version.run_id).info.artifact_uri).rglob("cases.parquet")
    cases.unlink()

    with pytest.raises(TrackingError, match="remove the alias champion"):
        own.promote(own.version(1, 3), 1, 3)


def test_cases_that_differ_within_one_split_are_left_to_a_person(own):
    own.promote(own.version(1, 2), 1, 2)

    decision = own.promote(own.version(1, 2, 3), 1, 2, 3)
    assert not decision.promoted
    assert "not comparable with version 1: the two runs were evaluated on different cases" in decision.reason
    assert decision.reason.endswith("to promote it anyway: python -m seqrec registry promote --version 2")


@pytest.mark.parametrize(
    ("ranks", "min_gain", "promoted"),
    [
        ([1, 1, 1, 1], 0.0, True),  # better for everyone
        ([1, 1, 1, 1], 0.5, False),  # by 1 - 1 / log2(4): the gain must exceed min_gain
        ([1, 9, 1, 9], 0.0, False),  # better on average, but not for sure
    ],
)
def test_the_gate_asks_for_a_gain_beyond_doubt(own, ranks, min_gain, promoted):
    own.promote(own.version(3, 3, 3, 3), 3, 3, 3, 3)

    decision = own.promote(own.version(*ranks), *ranks, min_gain=min_gain)
    assert decision.promoted == promoted
    assert own.champion() == (2 if promoted else 1)
    assert json.loads(own.tags(2)[registry.GAIN_TAG]) == list(decision.gain)
    assert own.tags(2)[registry.REASON_TAG] == decision.reason


def test_a_gain_is_not_paid_with_coverage_or_the_tail(own):
    tags = [gate.guard_tags({"valid/coverage@10": coverage, "valid/ndcg@10": 1.0}) for coverage in (0.5, 0.4)]
    assert list(tags[0]) == ["seqrec.valid/coverage_at_10"]
    own.promote(own.version(2, 2, 2, 2, **tags[0]), 2, 2, 2, 2)
    second = own.version(1, 1, 1, 1, **tags[1])

    decision = own.promote(second, 1, 1, 1, 1)
    assert not decision.promoted
    assert "valid/coverage@10 falls from 0.5000 to 0.4000" in decision.reason
    assert own.promote(second, 1, 1, 1, 1, max_loss=0.25).promoted


def while_deciding(monkeypatch, act):
    """Let the gate's first decision wait for `act`; the list that is returned says whether it did."""
    decide, entered = gate._decide, []

    def deciding(*arguments):
        decision = decide(*arguments)
        if not entered:
            entered.append(True)
            act()
        return decision

    monkeypatch.setattr(gate, "_decide", deciding)
    return entered


@pytest.mark.parametrize("first", ["better", "worse"])
def test_of_two_promotions_at_once_the_better_stays(own, monkeypatch, first):
    """While one is being decided, the whole promotion of the other passes."""
    own.promote(own.version(3, 3, 3, 3), 3, 3, 3, 3)
    ranks = {"better": [1] * 4, "worse": [2] * 4}
    versions = {kind: own.version(*ranks[kind]) for kind in ranks}
    second = "worse" if first == "better" else "better"
    entered = while_deciding(monkeypatch, lambda: own.promote(versions[second], *ranks[second]))

    decision = own.promote(versions[first], *ranks[first])

    assert entered
    assert own.champion() == int(versions["better"].version)
    assert decision.promoted == (first == "better")


def test_promotions_by_hand_are_audited_and_rolled_back(own, tmp_path, capsys):
    own.promote(own.version(2, 2), 2, 2)
    second = own.version(1, 1)

    store = f"sqlite:///{tmp_path}/events.db"
    log_clicks(Store(store), "1", 1)
    log_clicks(Store(store), "2", 3)
    own.by_hand("promote", 2, reason="a test", store=store)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("0.2500", "0.7500", "difference +0.5000, 95% interval"))
    assert own.champion() == 2
    own.by_hand("rollback")
    assert own.champion() == 1
    decision = own.promote(second, 1, 1)  # by far better, and measured once more
    assert (decision.promoted, decision.reason.split(";")[0]) == (False, "it was rolled back to version 1")

    own.by_hand("show")
    printed = " ".join(capsys.readouterr().out.split())
    assert "promote by hand: a test; click-through 0.7500 against 0.2500" in printed
    for entry in ("none -> 1: there was no champion before", "1 -> 2:", "2 -> 1: rollback by hand"):
        assert entry in printed


def test_a_rollback_leads_to_no_version_that_was_rolled_back_nor_round_in_a_circle(own):
    own.versions(3)
    for version in (2, 3, 1):  # the first one again
        own.by_hand("promote", version)
    before = own.stored()
    own.by_hand("promote", 1)  # nothing to do
    for action in ("rollback", "show"):
        with pytest.raises(ConfigError, match=f"--version has no effect with {action}"):
            own.by_hand(action, 2)
    assert own.stored() == before

    for expected in (3, 2):
        own.by_hand("rollback")
        assert own.champion() == expected
    with pytest.raises(ConfigError, match="no champion before"):
        own.by_hand("rollback")
    for version in (3, 1, 3):  # whoever promotes them wants them
        own.by_hand("promote", version)
    for expected in (1, 2):  # the one that 3 followed first
        own.by_hand("rollback")
        assert own.champion() == expected
    own.by_hand("promote", 1)
    own.by_hand("promote", 3)
    own.by_hand("promote", 1)
    own.by_hand("rollback")
    own.client.delete_model_version(own.name, "1")  # one that was rolled back
    own.by_hand("rollback")
    assert own.champion() == 2
    own.by_hand("promote", 3)
    own.client.delete_model_version(own.name, "2")
    with pytest.raises(ConfigError, match="rollback: version 2 was deleted"):
        own.by_hand("rollback")


def test_of_two_promotions_by_hand_the_second_starts_from_the_first(own, monkeypatch):
    """While one waits for its turn, the other passes."""
    own.versions(3)
    registering = runs.registering

    @contextmanager
    def late(*arguments):
        monkeypatch.setattr(registry_command, "registering", registering)
        own.by_hand("promote", 2)
        with registering(*arguments):
            yield

    monkeypatch.setattr(registry_command, "registering", late)
    own.by_hand("promote", 3)

    assert own.champion_history() == ["3", "2", "2", "1", "1"]


def test_a_promotion_by_hand_is_seen_by_the_gate_that_is_deciding(own, monkeypatch):
    _, second, _ = own.versions(3)
    while_deciding(monkeypatch, lambda: own.by_hand("promote", 3))

    decision = own.promote(second, 1, 1, 1, 1)

    assert "over version 3" in decision.reason
    assert own.champion_history() == ["2", "3", "3", "1", "1"]


def log_clicks(store, version, clicked):
    """Log one answer of the version to each of four users, and a click of so many of them."""
    names, click = [f"{version}-{number}" for number in range(4)], {"item": "i1", "kind": "buy", "at": 9.5}
    store.show([Shown(recommendation_id=name, user=name, version=version, items=["i1"], at=9.0) for name in names])
    store.add([Event(event_id=name, user=name, recommendation_id=name, **click) for name in names[:clicked]])


@pytest.mark.parametrize("kind", ["empty", "missing"])
def test_a_store_that_knows_nothing_keeps_nobody_from_promoting(own, kind, tmp_path, monkeypatch, caplog):
    file = tmp_path / "events.db"
    monkeypatch.setenv("SEQREC_STORE", f"sqlite:///{file}")
    if kind == "empty":
        Store(f"sqlite:///{file}")
    own.versions(2)
    own.by_hand("promote", 2)

    assert file.exists() == (kind == "empty")
    assert (f"there is no file {file}" in caplog.text) == (kind == "missing")
    assert any(entry.endswith("promote by hand") for entry in own.stored()[0].values())


def test_show_marks_candidate_and_champion(own, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    own.versions(3)
    own.client.set_registered_model_alias(own.name, registry.CANDIDATE, "2")
    own.client.set_registered_model_alias(own.name, "newest", "2")

    own.by_hand("show")

    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    shown = [(cells[1].strip(), cells[4].strip()) for cells in lines]
    assert shown == [("1", "champion"), ("2", "candidate, newest"), ("3", "")]


def test_what_cannot_be_done_by_hand_is_refused(own):
    with pytest.raises(ConfigError, match="is not registered"):
        own.by_hand("show")
    own.versions(1)
    for action, version, message in (
        ("promote", 0, "--version: name the version to promote"),
        ("promote", 7, "has no version 7"),
        ("rollback", 0, "no champion before"),
    ):
        with pytest.raises(ConfigError, match=message):
            own.by_hand(action, version)
