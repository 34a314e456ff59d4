from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils
from support import exit_of
from unsynced import make_tables

from seqrec.config import RegisterConfig
from seqrec.tracking import registry, runs
from seqrec.tracking.runs import TrackingError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.fixture
def run(client, config, request):
    return runs.open_run(client, runs.experiment(client, config), request.node.name, "run")


def points(client, run, key):
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]


def test_an_experiment_that_another_process_has_just_created_is_used(client, config, monkeypatch):
    known = runs.experiment(client, config)
    answers = [None, client.get_experiment(known)]
    monkeypatch.setattr(client, "get_experiment_by_name", lambda name: answers.pop(0))

    assert runs.experiment(client, config) == known


def test_metric_names_that_mlflow_allows(client, run):
    runs.log_metrics(client, run, {"loss/task": 2.0, "test/ndcg@10/popularity=head": 0.5, "ndcg@10/length=51+": 0.25})

    assert client.get_run(run.info.run_id).data.metrics == {
        "loss/task": 2.0,
        "test/ndcg_at_10/popularity.head": 0.5,
        "ndcg_at_10/length.51_": 0.25,
    }


def test_a_value_logged_again_is_no_second_point_and_a_changed_one_is_the_latest(client, run):
    runs.log_metrics(client, run, {"test/mrr": 0.5})
    runs.log_metrics(client, client.get_run(run.info.run_id), {"test/mrr": 0.5})
    assert points(client, run, "test/mrr") == [(0, 0.5)]

    runs.log_metrics(client, client.get_run(run.info.run_id), {"test/mrr": 0.25})
    assert client.get_run(run.info.run_id).data.metrics["test/mrr"] == 0.25


def test_a_run_is_found_by_its_fingerprint_and_gets_a_new_parent(client, config):
    experiment = runs.experiment(client, config)
    first = runs.open_run(client, experiment, "found", "a", parent="p1", seconds=60)
    again = runs.open_run(client, experiment, "found", "a", parent="p2")

    assert again.info.run_id == first.info.run_id
    assert client.get_run(first.info.run_id).data.tags["mlflow.parentRunId"] == "p2"
    assert time.time() - first.info.start_time / 1000 == pytest.approx(60, abs=10)
    assert runs.find_run(client, experiment, "never begun") is None


def test_a_deleted_experiment_is_an_error_that_says_how_to_restore_it(client, config):
    name = "deleted"
    client.delete_experiment(client.create_experiment(name))

    with pytest.raises(TrackingError, match=r"register.experiment: 'deleted' was deleted.*mlflow experiments restore"):
        runs.experiment(client, RegisterConfig(tracking_uri=config.tracking_uri, experiment=name))


def test_a_database_moved_away_from_its_artifacts_is_an_error(client, config, tmp_path):
    client.create_experiment("moved", artifact_location=str(tmp_path / "old place" / "mlartifacts"))

    with pytest.raises(TrackingError, match=rf"not beside itself.*`ln -s .* {tmp_path}/old place`"):
        runs.connect(RegisterConfig(tracking_uri=config.tracking_uri, experiment="moved"))


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "file:./mlruns"])
def test_a_server_that_does_not_answer_names_the_setting(uri):
    with pytest.raises(TrackingError, match=rf"register.tracking_uri: {uri} does not answer.*MLFLOW_TRACKING_URI"):
        runs.connect(RegisterConfig(tracking_uri=uri))


def test_a_folder_in_place_of_the_database_is_named_at_once(tmp_path):
    with pytest.raises(TrackingError, match=rf"sqlite:///{tmp_path} does not answer \(it is a folder, but must be a f"):
        runs.connect(RegisterConfig(tracking_uri=f"sqlite:///{tmp_path}"))


def connect_and_die(folder: Path) -> None:
    """Connect to a database in `folder`; die when its first table is made."""
    os.chdir(folder)
    utils._initialize_tables = make_tables
    sqlalchemy.event.listen(sqlalchemy.Table, "after_create", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    runs.connect(RegisterConfig())


def test_killed_while_the_database_is_made_leaves_none_behind(tmp_path):
    assert exit_of(connect_and_die, tmp_path) == -signal.SIGKILL

    assert not (tmp_path / "mlflow.db").exists()
    assert list(tmp_path.iterdir())  # it had begun
    assert runs.connect(RegisterConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")).search_experiments()
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


def test_a_database_that_comes_back_while_a_new_one_is_created_is_kept(client, config, tmp_path, monkeypatch):
    file, create = tmp_path / "mlflow.db", MlflowClient.search_experiments
    own = RegisterConfig(tracking_uri=f"sqlite:///{file}", experiment="own")
    assert registry.alias_version(name="seqrec-own", alias=registry.CHAMPION, config=own) == ""
    assert registry.datasets(own) == []
    assert not file.exists()  # looking for a champion creates nothing

    def restored(self, **options):
        shutil.copy(config.tracking_uri.removeprefix("sqlite:///"), file)
        return create(self, **options)

    client.create_experiment("kept")
    monkeypatch.setattr(MlflowClient, "search_experiments", restored)
    assert runs.connect(own).get_experiment_by_name("kept")
    assert not (tmp_path / "mlflow.db.partial").exists()


def test_the_champion_is_that_of_the_database_in_place_of_another(client, config, tmp_path):
    first, file = config.tracking_uri.removeprefix("sqlite:///"), tmp_path / "mlflow.db"
    own = RegisterConfig(tracking_uri=f"sqlite:///{file}", experiment="own")
    shutil.copy(first, file)
    assert registry.alias_version(name="seqrec-back", alias=registry.CHAMPION, config=own) == ""

    run = client.create_run("0").info
    client.create_registered_model("seqrec-back")
    client.create_model_version("seqrec-back", source=run.artifact_uri, run_id=run.run_id)
    client.set_registered_model_alias("seqrec-back", registry.CHAMPION, "1")
    file.unlink()
    shutil.copy(first, file)
    assert registry.alias_version(name="seqrec-back", alias=registry.CHAMPION, config=own) == "1"


def test_a_folder_that_no_address_can_name_is_refused(tmp_path):
    with pytest.raises(runs.TrackingError, match=r"50%20x has % or \? in its name"):
        runs.connect(RegisterConfig(tracking_uri=f"sqlite:///{tmp_path}/50%20x/mlflow.db"))


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("database is locked", "another process has locked the database; wait"),
        ("database or disk is full", "the disk is full; free some space"),
        ("attempt to write a readonly database", "the database is read-only"),
        ("no such table: runs", r"failed: \(sqlite3.OperationalError\) no such table: runs$"),
    ],
)
def test_a_database_that_fails_is_one_line_that_says_what_to_do(config, words, advice):
    with pytest.raises(TrackingError, match=advice) as raised, runs.explained(config):
        raise sqlalchemy.exc.OperationalError("INSERT INTO runs ...", {"key": "value"}, sqlite3.OperationalError(words))
    assert "INSERT" not in str(raised.value)


def test_a_resumed_training_goes_on_in_its_run_without_a_point_twice(client, config, caplog):
    def fail_after_two_epochs():
        with runs.live_run("resumed", "sasrec", config) as log:
            log({"loss": 3.0}, 1)
            log({"loss": 2.0}, 2)
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail_after_two_epochs()
    experiment = runs.experiment(client, config)
    assert runs.find_run(client, experiment, "resumed").info.status == "FAILED"

    with runs.live_run("resumed", "sasrec", config) as log:
        log({"loss": 2.0}, 2)  # trained again, with the same result
        log({"phase": "train", "step": 30, "loss": 1 / 3, "valid/ndcg@10": float("nan")}, 3)

    run = runs.find_run(client, experiment, "resumed")
    assert run.info.status == "FINISHED"
    assert points(client, run, "curve/loss") == [(1, 3.0), (2, 2.0), (3, 0.3333)]
    assert set(run.data.metrics) == {"curve/loss"}  # no step; and a number that is none is not a point
    assert not caplog.records


def test_only_the_first_process_logs(client, config, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with runs.live_run("rank 1", "sasrec", config) as log:
        log({"loss": 1.0}, 1)

    assert runs.find_run(client, runs.experiment(client, config), "rank 1") is None


def test_a_server_that_goes_down_costs_a_training_one_warning(client, config, monkeypatch, caplog):
    with runs.live_run("down", "sasrec", config) as log:
        log({"loss": 3.0}, 1)
        refuse = mock.Mock(side_effect=MlflowException("the server went away"))
        monkeypatch.setattr(MlflowClient, "log_batch", refuse)
        log({"loss": 2.0}, 2)
        monkeypatch.undo()
        log({"loss": 1.0}, 3)

    assert points(client, runs.find_run(client, runs.experiment(client, config), "down"), "curve/loss") == [(1, 3.0)]
    (record,) = [record for record in caplog.records if record.name.startswith("seqrec")]
    assert "off (the server went away); `register` will import this run" in record.getMessage()


def test_a_server_that_never_answers_holds_a_training_up_once(monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        with runs.live_run("hung", "sasrec", RegisterConfig(tracking_uri=uri)) as log:
            for epoch in range(1, 1000):
                log({"loss": 1.0}, epoch)
    assert time.monotonic() - began < 5
    (record,) = [record for record in caplog.records if record.name.startswith("seqrec")]
    assert "`register` will import this run" in record.getMessage()


def test_training_runs_where_mlflow_is_not_installed(monkeypatch, config, caplog):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with runs.live_run("none", "sasrec", config) as log:
        log({"loss": 1.0}, 1)

    assert "live logging to MLflow is off" in caplog.text


@pytest.mark.parametrize(
    ("pipeline", "state", "mark", "outcome"),
    [
        ("training", "FAILED", "this run", "SUCCEEDED"),
        ("training", "COMPLETE", "the run before", "FAILED"),
        ("training", "COMPLETE", None, "FAILED"),
        ("pretraining", "RUNNING", None, "SUCCEEDED"),  # it does not register
        ("pretraining", "FAILED", None, "FAILED"),
    ],
)
def test_a_pipeline_has_succeeded_if_register_has_left_its_mark(client, config, pipeline, state, mark, outcome):
    experiment, pipeline_run = runs.experiment(client, config), f"{pipeline} {state} {mark}"
    if mark:
        run = runs.open_run(client, experiment, f"f {pipeline_run}", "run")
        client.set_tag(run.info.run_id, runs.PIPELINE_RUN, pipeline_run)
        client.set_tag(run.info.run_id, runs.COMPLETE, pipeline_run if mark == "this run" else mark)

    failure = "why" if pipeline == "pretraining" else ""
    runs.record_outcome(pipeline=pipeline, pipeline_run=pipeline_run, state=state, failure=failure, config=config)

    (ended,) = client.search_runs([experiment], f"tags.`{runs.PIPELINE_RUN}` = '{pipeline_run}'")
    assert ended.info.run_name == ("run" if mark else f"{pipeline}-{pipeline_run[:8]}")
    assert ended.info.status == ("FINISHED" if outcome == "SUCCEEDED" else "FAILED")
    assert ended.data.tags[runs.OUTCOME] == outcome
    assert failure in ended.data.tags[runs.FAILURE]
    assert ("gives no reason" in ended.data.tags[runs.FAILURE]) == (outcome == "FAILED" and not failure)
