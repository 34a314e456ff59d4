"""`python -m seqrec.pipelines submit, schedule, upload` over HTTP, against a server that checks every request."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import kfp_server
import pytest
import yaml
from support import YEAR_2001, write_cluster_settings, write_settings

from seqrec.pipelines.__main__ import main
from seqrec.pipelines.client import Package, Server, SubmissionError, submit, wait

IMAGE = "registry.example.org/seqrec@sha256:" + "0" * 64
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def _digest(monkeypatch):
    monkeypatch.setattr("seqrec.pipelines.client.IMAGE", IMAGE)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command on the settings of a tiny log: its status and what it printed."""
    for name in ("KFP_HOST", "KFP_TOKEN", "KFP_COOKIES", "SEQREC_DATA_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    settings = write_cluster_settings(tmp_path)

    def run(name: str, *flags: str, token: str = kfp_server.TOKEN) -> tuple[int, str]:
        status = main([name, "--params", str(settings), "--models", "sasrec", "--token", token, *flags])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


@pytest.mark.usefixtures("_digest")
def test_a_failed_run_fails_the_command(tmp_path, command, monkeypatch):
    """What fails in such a run, and what is recorded of it: test_pipelines.py."""
    ended = {"state": "FAILED", "error": {"code": 1, "message": "ingest failed"}}
    monkeypatch.setattr(kfp_server.Server, "_execute", lambda _, run: run.update(ended))
    with kfp_server.serving(tmp_path) as (host, server):
        status, said = command("submit", "--host", host, "--wait", "--poll", "0.1")

    (run,) = server.runs.values()
    assert status == 1
    assert f"run {run['run_id']} failed" in said
    assert "ingest" in said


@pytest.mark.usefixtures("_digest")
@pytest.mark.parametrize(
    ("flags", "token", "message"),
    [
        ((), "a wrong one", "the token or the cookies are refused"),
        (
            ("--namespace", kfp_server.FORBIDDEN),
            kfp_server.TOKEN,
            f"may not do that in namespace {kfp_server.FORBIDDEN}",
        ),
        ((), kfp_server.TOKEN, "--namespace: .* serves several users; name your namespace"),
    ],
    ids=["401", "403", "no namespace"],
)
def test_a_server_that_refuses_is_explained(tmp_path, command, flags, token, message):
    with kfp_server.serving(tmp_path, multi_user=True) as (host, server):
        status, said = command("submit", "--host", host, *flags, token=token)

    assert status == 1
    assert re.search(message, said), said
    assert not server.runs


@pytest.mark.usefixtures("_digest")
def test_a_server_that_does_not_answer_is_explained(command):
    status, said = command("submit", "--host", "http://127.0.0.1:9")

    assert status == 1
    assert "--host: http://127.0.0.1:9 does not answer" in said


def test_an_image_without_digest_is_refused_before_anything_is_sent(tmp_path, command):
    with kfp_server.serving(tmp_path) as (host, server):
        status, said = command("submit", "--host", host)

    assert (status, server.seen) == (1, [])
    assert "SEQREC_IMAGE: seqrec:latest has no digest" in said


@pytest.mark.usefixtures("_digest")
@pytest.mark.parametrize("name", ["submit", "upload"])
def test_results_in_a_file_of_a_pod_are_refused_before_anything_is_sent(tmp_path, command, name):
    write_settings(tmp_path, start=YEAR_2001)  # tracking in a SQLite file
    with kfp_server.serving(tmp_path) as (host, server):
        status, said = command(name, "--host", host)

    assert (status, server.seen) == (1, [])
    assert "register.tracking_uri: sqlite:///" in said
    assert "would be lost with its pod" in said


@pytest.mark.usefixtures("_digest")
def test_an_upload_makes_a_pipeline_of_the_namespace_and_then_versions_of_it(tmp_path, command):
    with kfp_server.serving(tmp_path, multi_user=True) as (host, server):
        for namespace in ("mine", "yours", "yours"):
            status, said = command("upload", "--host", host, "--namespace", namespace)
            assert status == 0, said

    mine, yours = server.pipelines.values()
    assert mine["display_name"] == yours["display_name"] == "seqrec-training"
    assert [one["pipeline_id"] for one in server.versions.values()] == [
        mine["pipeline_id"],
        yours["pipeline_id"],
        yours["pipeline_id"],
    ]


@pytest.mark.usefixtures("_digest")
def test_a_schedule_repeats_the_retraining_and_replaces_the_one_before(tmp_path, command, capsys):
    with kfp_server.serving(tmp_path) as (host, server):
        assert command("schedule", "--host", host, "--cron", "0 0 1 * * *")[0] == 0
        status, said = command("schedule", "--host", host, "--cron", "0 0 3 * * 0", "--root", "s3://bucket/runs")
        refused, message = command("schedule", "--host", host, "--cron", "0 3 * * 0")

    assert status == 0, said
    (recurring,) = server.recurring.values()
    (pipeline,) = server.pipelines.values()
    assert recurring["recurring_run_id"] in said
    assert recurring["trigger"]["cron_schedule"]["cron"] == "0 0 3 * * 0"
    assert recurring["pipeline_version_reference"]["pipeline_id"] == pipeline["pipeline_id"]
    assert pipeline["display_name"] == "seqrec-retraining"
    assert recurring["runtime_config"]["pipeline_root"] == "s3://bucket/runs"
    assert recurring["no_catchup"]
    assert recurring["max_concurrency"] == "1"
    assert (refused, "six fields" in message) == (1, True)

    with kfp_server.serving(tmp_path) as (host, server):
        assert command("schedule", "--host", host, "--cron", "0 0 3 * * 0")[0] == 0
        for command_, expected in (("schedules", "retraining  0 0 3 * * 0  ENABLED"), ("unschedule", "deleted 1")):
            assert main([command_, "--host", host, "--token", kfp_server.TOKEN]) == 0
            assert expected in capsys.readouterr().out
    assert not server.recurring


@pytest.mark.usefixtures("_digest")
def test_no_cache_and_service_account_reach_the_server(tmp_path, monkeypatch):
    settings = write_cluster_settings(tmp_path)
    content = yaml.safe_load(settings.read_text())
    content["kubernetes"]["service_account"] = "seqrec"
    settings.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(kfp_server.Server, "_execute", lambda *_: None)
    with kfp_server.serving(tmp_path) as (host, server):
        place = Server(host=host, token=kfp_server.TOKEN)
        run_id = submit(place, Package(models=["sasrec"], params=settings, cache=False), root="s3://bucket/runs")
        with pytest.raises(SubmissionError, match=f"run {run_id} is still RUNNING"):
            wait(place, run_id, timeout_s=0.1, poll_s=0.1)
        server.runs[run_id]["state"] = "CANCELED"
        with pytest.raises(SubmissionError, match="canceled"):
            wait(place, run_id, timeout_s=5, poll_s=0.1)

    run = server.runs[run_id]
    assert run["service_account"] == "seqrec"
    assert run["runtime_config"]["pipeline_root"] == "s3://bucket/runs"
    spec = run["pipeline_spec"]["pipeline_spec"]
    dags = [part["dag"] for part in (spec["root"], *spec["components"].values()) if "dag" in part]
    tasks = [task for dag in dags for task in dag["tasks"].values()]
    assert len(tasks) > 10
    assert not any(task.get("cachingOptions", {}).get("enableCache") for task in tasks)


@pytest.mark.usefixtures("_digest")
def test_a_run_is_awaited_through_failed_polls_and_gets_the_inputs_of_the_command(tmp_path, command, monkeypatch):
    def succeed(server, run):
        server.fail_next = [503, 401]
        run["state"] = "SUCCEEDED"

    monkeypatch.setattr(kfp_server.Server, "_execute", succeed)
    with kfp_server.serving(tmp_path) as (host, server):
        inputs = ("--epochs", "3", "--override", "finetune.patience=2", "--dataset", "own")
        status, said = command("submit", "--host", host, "--wait", "--poll", "0.1", *inputs)
        wrong, why = command("submit", "--host", host, "--override", "finetune.patiense=2")

    assert (status, server.fail_next) == (0, []), said
    (run,) = server.runs.values()
    given = run["runtime_config"]["parameters"]
    assert (given["epochs"], given["overrides"]["finetune.patience"]) == (3, 2)
    assert (wrong, "finetune.patiense: unknown key" in why) == (1, True)


@pytest.mark.usefixtures("_digest")
def test_waiting_ends_where_the_server_stays_away(monkeypatch):
    monkeypatch.setattr("seqrec.pipelines.client.FAILED_POLLS", 2)
    with pytest.raises(SubmissionError, match=r"does not answer .* run 1 continues on the server"):
        wait(Server(host="http://127.0.0.1:9"), "1", timeout_s=60, poll_s=0.1)


@pytest.mark.cluster
def test_a_real_server_runs_the_pipeline():
    """Needs KFP_HOST, SEQREC_IMAGE by digest, SEQREC_PARAMS with data that the cluster reaches, KFP_TOKEN if asked."""
    flags = ["--params", os.environ.get("SEQREC_PARAMS", "params.yaml"), "--wait"]
    if "KFP_NAMESPACE" in os.environ:
        flags += ["--namespace", os.environ["KFP_NAMESPACE"]]

    done = subprocess.run([sys.executable, "-m", "seqrec.pipelines", "submit", *flags], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
