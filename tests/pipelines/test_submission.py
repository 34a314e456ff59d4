"""`python -m seqrec.pipelines submit, schedule, upload` over HTTP, against a server that checks every request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler

import kfp_server
import pytest
import yaml
from support import YEAR_2001, Quiet, listening, write_cluster_settings, write_settings

from seqrec.pipelines.__main__ import main
from seqrec.pipelines.client import Server, SubmissionError, wait

IMAGE = "registry.example.org/seqrec@sha256:" + "0" * 64


@pytest.fixture
def server(tmp_path, monkeypatch):
    """What a server knows, which is the one that commands talk to."""
    for name in ("KFP_COOKIES", "SEQREC_DATA_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    with kfp_server.serving(tmp_path) as (host, known):
        monkeypatch.setenv("KFP_HOST", host)
        monkeypatch.setenv("KFP_TOKEN", kfp_server.TOKEN)
        yield known


@pytest.fixture
def command(tmp_path, server, monkeypatch, capsys):
    """Return a function that runs a command on the settings of a tiny log: its status and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("seqrec.pipelines.client.IMAGE", IMAGE)
    settings = write_cluster_settings(tmp_path)

    def run(name: str, *flags: str) -> tuple[int, str]:
        status = main([name, "--params", str(settings), "--models", "sasrec", *flags])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_a_failed_run_fails_the_command(server, command, monkeypatch):
    """What fails in such a run, and what is recorded of it: test_pipelines.py."""
    ended = {"state": "FAILED", "error": {"code": 1, "message": "ingest failed"}}
    monkeypatch.setattr(kfp_server.Server, "_execute", lambda _, run: run.update(ended))

    status, said = command("submit", "--wait", "--poll", "0.1")

    (run,) = server.runs.values()
    assert status == 1
    assert f"run {run['run_id']} failed: ingest failed" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--token", "a wrong one"), "the token or the cookies are refused"),
        (("--namespace", kfp_server.FORBIDDEN), f"may not do that in namespace {kfp_server.FORBIDDEN}"),
        ((), "--namespace: .* serves several users; name your namespace"),
        (("--host", "http://127.0.0.1:9"), "--host: http://127.0.0.1:9 does not answer"),
        (("--host", ""), "--host: no server is named"),
    ],
    ids=["401", "403", "no namespace", "no server", "no host"],
)
def test_a_server_that_refuses_is_explained(server, command, flags, message):
    server.multi_user = True

    status, said = command("submit", *flags)

    assert status == 1
    assert re.search(message, said), said
    assert not server.runs


class _Page(Quiet, BaseHTTPRequestHandler):
    """What stands before a server: it leads to a page where one logs in, or says nothing for a while."""

    def do_GET(self):
        if "slow" in self.path:
            time.sleep(1)
        elif self.path == "/login":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"<html>")
        else:
            self.send_response(302)
            self.send_header("Location", "/login")
            self.send_header("Content-Length", "0")
            self.end_headers()


@pytest.mark.parametrize(
    ("name", "path", "message"), [("submit", "", "the session has expired"), ("upload", "/slow", "timed out")]
)
def test_a_page_or_silence_is_not_taken_for_an_answer(command, monkeypatch, name, path, message):
    monkeypatch.setattr("seqrec.pipelines.client.ANSWER_S", 0.1)
    with listening(_Page) as page:
        status, said = command(name, "--host", f"http://127.0.0.1:{page.server_port}{path}")

    assert (status, message in said) == (1, True), said


def test_a_pod_without_a_token_of_its_own_asks_without(server, command, monkeypatch):
    monkeypatch.setattr("seqrec.pipelines.client.IN_CLUSTER", os.environ["KFP_HOST"])
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for name in ("KFP_HOST", "KFP_TOKEN"):
        monkeypatch.delenv(name)

    status, said = command("submit")

    assert (status, "the token or the cookies are refused, or there are none" in said) == (1, True), said


def test_an_image_without_digest_is_refused_before_anything_is_sent(server, command, monkeypatch):
    monkeypatch.setattr("seqrec.pipelines.client.IMAGE", "seqrec:latest")

    status, said = command("submit")

    assert (status, server.seen) == (1, [])
    assert "SEQREC_IMAGE: seqrec:latest has no digest" in said


@pytest.mark.parametrize("name", ["submit", "upload"])
def test_results_in_a_file_of_a_pod_are_refused_before_anything_is_sent(tmp_path, server, command, name):
    write_settings(tmp_path, start=YEAR_2001)  # tracking in a SQLite file

    status, said = command(name)

    assert (status, server.seen) == (1, [])
    assert "register.tracking_uri: sqlite:///" in said
    assert "would be lost with its pod" in said


def test_an_upload_makes_a_pipeline_of_the_namespace_and_then_versions_of_it(server, command):
    server.multi_user = True
    for namespace in ("mine", "yours", "yours"):
        status, said = command("upload", "--namespace", namespace)
        assert status == 0, said

    mine, yours = server.pipelines.values()
    assert mine["display_name"] == yours["display_name"] == "seqrec-training"
    found = [one["pipeline_id"] for one in server.versions.values()]
    assert found == [mine["pipeline_id"], yours["pipeline_id"], yours["pipeline_id"]]


def test_a_schedule_repeats_the_retraining_and_replaces_the_one_before(server, command, capsys):
    assert command("schedule", "--cron", "0 0 1 * * *")[0] == 0
    status, said = command("schedule", "--cron", "0 0 3 * * 0", "--root", "s3://bucket/runs")
    refused, message = command("schedule", "--cron", "0 3 * * 0")

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

    for name, expected in (("schedules", "retraining  0 0 3 * * 0  ENABLED"), ("unschedule", "deleted 1")):
        assert main([name]) == 0
        assert expected in capsys.readouterr().out
    assert not server.recurring


def test_no_cache_and_service_account_reach_the_server(tmp_path, server, command, monkeypatch):
    settings = tmp_path / "settings.yaml"
    content = yaml.safe_load(settings.read_text())
    content["kubernetes"]["service_account"] = "seqrec"
    settings.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(kfp_server.Server, "_execute", lambda *_: None)

    flags = ("--no-cache", "--root", "s3://bucket/runs", "--wait", "--timeout", "0.1", "--poll", "0.1")
    assert "is still RUNNING" in command("submit", *flags)[1]

    (run,) = server.runs.values()
    assert run["service_account"] == "seqrec"
    assert run["runtime_config"]["pipeline_root"] == "s3://bucket/runs"
    spec = run["pipeline_spec"]["pipeline_spec"]
    dags = [part["dag"] for part in (spec["root"], *spec["components"].values()) if "dag" in part]
    tasks = [task for dag in dags for task in dag["tasks"].values()]
    assert len(tasks) > 10
    assert not any(task.get("cachingOptions", {}).get("enableCache") for task in tasks)


def test_a_run_is_awaited_through_failed_polls_and_gets_the_inputs_of_the_command(server, command, monkeypatch):
    def succeed(server, run):
        server.fail_next = [503, 401]
        run["state"] = "SUCCEEDED"

    monkeypatch.setattr(kfp_server.Server, "_execute", succeed)
    inputs = ("--epochs", "3", "--override", "finetune.patience=2", "--dataset", "own")
    status, said = command("submit", "--wait", "--poll", "0.1", *inputs)
    wrong, why = command("submit", "--override", "finetune.patiense=2")
    unknown, said_of_it = command("submit", "--models", "flashrec")

    assert (status, server.fail_next) == (0, []), said
    (run,) = server.runs.values()
    given = run["runtime_config"]["parameters"]
    assert (given["epochs"], given["overrides"]["finetune.patience"]) == (3, 2)
    assert (wrong, "finetune.patiense: unknown key" in why) == (1, True)
    assert (unknown, "--models: no entry models.flashrec" in said_of_it) == (1, True)


def test_the_usage_names_the_module(capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--help"])

    assert capsys.readouterr().out.startswith("usage: python -m seqrec.pipelines compile ")


def test_without_docker_the_command_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert main(["run-local", "--docker", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("run-local: --docker: Docker does not answer: ")


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
