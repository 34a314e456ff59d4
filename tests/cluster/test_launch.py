"""Where a stage runs changes nothing but where: one process, two of this machine, a job of the cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import kubernetes_server
import pytest
import torch
from safetensors.torch import load_file
from support import KUBERNETES, run_pretrain, until

from seqrec.artifacts import EPOCH_RECORDS, WEIGHTS, DamagedError
from seqrec.cluster import jobs, launch
from seqrec.config import ConfigError, FinetuneConfig, KubernetesConfig, LaunchConfig, StepResources, parse
from seqrec.warm import SOCKET

OPTIONS = {"d_model": 16, "layers": 1, "heads": 2, "length": 12, "dropout": 0.0}
CONFIG = FinetuneConfig(epochs=2, batch_size=16, warmup_steps=1)
CLUSTER = KubernetesConfig(**KUBERNETES, launch={"finetune": LaunchConfig(launcher="job", nodes=2)})


def place(**launch_settings) -> dict:
    """Return what the variable `PLACE` of a step holds."""
    launched = LaunchConfig(**{"poll_s": 0.1, **launch_settings})
    image = "example.org/seqrec@sha256:1"
    where = jobs.Place(launch=launched, image=image, resources=CLUSTER.step("finetune"), cluster=CLUSTER)
    return json.loads(json.dumps(dataclasses.asdict(where)))


@pytest.fixture(autouse=True)
def _forked_processes(forked_steps, tmp_path, monkeypatch):
    """Let torchrun and its processes be forks of the warm process: torchrun is called with -m, they with -u -m."""
    python = tmp_path / "python"
    warm = f'{SOCKET}={os.environ[SOCKET]} exec {sys.executable} -m seqrec.warm "$@"'  # a fork has no such variable
    python.write_text(f'#!/bin/sh\n[ "$1" != -u ] || shift\n{warm}\n')
    python.chmod(0o700)
    monkeypatch.setenv("PYTHON_EXEC", str(python))
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.fixture(scope="module")
def initial(prepared, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("initial")
    run_pretrain("sasrec", prepared.parent, folder, OPTIONS)
    return folder / "initial"


@pytest.fixture
def finetuned(prepared, initial, tmp_path, monkeypatch):
    """Return a function that fine-tunes at a place, and the weights and losses that come of it."""

    def run(name: str, where: dict):
        monkeypatch.setenv(launch.PLACE, json.dumps(where))
        values = launch.run(
            "finetune",
            state=tmp_path / "state",
            model="sasrec",
            sequences=prepared,
            initial=initial,
            checkpoint=tmp_path / name,
            filter_seen=True,
            config=CONFIG,
        )
        records = [json.loads(line) for line in (tmp_path / name / EPOCH_RECORDS).read_text().splitlines()]
        return values, load_file(tmp_path / name / WEIGHTS), [record["loss"] for record in records]

    return run


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with kubernetes_server.serving(tmp_path) as (file, found):
        monkeypatch.setenv("KUBECONFIG", str(file))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        yield found


def assert_close(first, second):
    assert first[0]["valid/ndcg@10"] == pytest.approx(second[0]["valid/ndcg@10"], abs=1e-4)
    assert first[2] == pytest.approx(second[2], rel=1e-5)
    torch.testing.assert_close(first[1], second[1], rtol=1e-3, atol=1e-5)


def test_two_processes_and_a_job_of_two_nodes_give_what_one_process_gives(finetuned, cluster, tmp_path, monkeypatch):
    """One attempt at the job fails, and one loses its output; the last one finds what they left behind."""
    alone = finetuned("alone", {"launch": {"processes": 1}})

    assert_close(finetuned("two", {"launch": {"processes": 2}}), alone)
    assert cluster.created == []

    def attempt(pod: str):
        monkeypatch.setenv("KFP_POD_NAME", f"pod-{pod}")
        monkeypatch.setenv("KFP_POD_UID", pod)
        return finetuned(pod, place(launcher="job", nodes=2))

    cluster.fail_next, cluster.lose_next = 1, 1
    with pytest.raises(ValueError, match=r"TrainJob somebodys/finetune-sasrec-.* failed: so"):
        attempt("first")
    assert list(cluster.jobs)  # a failed job is still there when the next attempt begins
    with pytest.raises(ValueError, match="output is missing"):
        attempt("second")
    assert_close(attempt("third"), alone)
    assert len({job["metadata"]["name"] for job in cluster.created}) == 1
    owners = [[one["uid"] for one in job["metadata"]["ownerReferences"]] for job in cluster.created]
    assert owners == [["first"], ["second"], ["third"]]
    assert cluster.jobs == {}
    assert not list((tmp_path / "state" / "jobs").iterdir())


def test_a_step_that_finds_the_job_of_an_earlier_pod_adopts_it_and_deletes_it_when_told_to_end(
    finetuned, cluster, monkeypatch
):
    cluster.hang = True
    owners = []

    def end() -> None:
        until(lambda: cluster.jobs)
        time.sleep(0.3)
        owners.extend(job["metadata"]["ownerReferences"][0]["uid"] for job in cluster.jobs.values())
        os.kill(os.getpid(), signal.SIGTERM)

    for uid in ("first", "second"):
        monkeypatch.setenv("KFP_POD_NAME", "pod")
        monkeypatch.setenv("KFP_POD_UID", uid)
        threading.Thread(target=end, daemon=True).start()
        with pytest.raises(SystemExit):
            finetuned("job", place(launcher="job"))
        assert cluster.jobs == {}
        if uid == "first":  # as after a kill that leaves no time
            cluster.jobs |= {job["metadata"]["name"]: job for job in cluster.created}

    assert owners == ["first", "second"]
    assert len(cluster.created) == 1


def test_a_job_that_somebody_deletes_fails_the_step(finetuned, cluster):
    cluster.hang = True

    def delete() -> None:
        until(lambda: cluster.jobs)
        cluster.jobs.clear()

    threading.Thread(target=delete, daemon=True).start()
    with pytest.raises(ValueError, match="was deleted before it was complete"):
        finetuned("job", place(launcher="job"))


def test_a_job_is_awaited_while_the_cluster_cannot_answer(finetuned, cluster, monkeypatch):
    cluster.unavailable = 3
    values, _, _ = finetuned("job", place(launcher="job"))
    assert values
    assert (cluster.unavailable, cluster.jobs) == (0, {})

    monkeypatch.setattr(jobs, "ANSWER_S", 0.1)
    cluster.slow = True
    with pytest.raises(jobs.NoAnswerError, match="timed out"):
        finetuned("slow", place(launcher="job", image="example.org/a-third"))
    cluster.slow = False
    monkeypatch.setattr(jobs, "FAILED_POLLS", 2)
    cluster.hang, cluster.unavailable = True, 2
    with pytest.raises(jobs.NoAnswerError, match=r"not now.*the job continues on the cluster"):
        finetuned("again", place(launcher="job", image="example.org/another"))
    assert cluster.jobs


def test_a_process_that_fails_fails_the_step(finetuned, tmp_path):
    (tmp_path / "two").write_text("where a folder must be made")

    with pytest.raises(ValueError, match="one of 2 processes failed"):
        finetuned("two", {"launch": {"processes": 2}})


@pytest.mark.parametrize(
    ("settings", "kinds", "message"),
    [
        ({"token": "wrong"}, ("trainjobs",), "credentials are refused"),
        ({"namespace": "elsewhere"}, ("trainjobs",), "service_account may not do this"),
        ({}, (), "install Kubeflow Trainer 2, or set launcher: step"),
    ],
)
def test_a_cluster_that_refuses_is_explained(finetuned, tmp_path, monkeypatch, settings, kinds, message):
    folder = tmp_path / "cluster"
    folder.mkdir()
    with kubernetes_server.serving(folder, kinds) as (file, _):
        server = file.read_text().partition("server: ")[2].split()[0]
        kubernetes_server.write_config(file, server, **settings)
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))

        with pytest.raises(ConfigError, match=message):
            finetuned("none", place(launcher="job"))


def test_a_train_job_asks_for_all_that_is_set():
    where = parse(jobs.Place, place(launcher="job", nodes=2, processes=2), "place")
    job = jobs.train_job("finetune-sasrec-1", where, Path("/state"), Path("/state/jobs/order.json"))

    kubernetes_server.check(job)
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["image"] == "example.org/seqrec@sha256:1"
    assert trainer["resourcesPerNode"] == {
        "requests": {"cpu": "4", "memory": "64Gi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "1"},
    }
    assert {one["name"] for one in trainer["env"]} == {"OMP_NUM_THREADS", "MLFLOW_TRACKING_PASSWORD"}
    (node,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert [one["key"] for one in pod["tolerations"]] == ["nvidia.com/gpu"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["serviceAccountName"] == "seqrec"
    assert {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]} == {"/state", "/tmp", "/dev/shm"}
    assert job["spec"]["activeDeadlineSeconds"] == 3600


def test_a_spark_application_is_one():
    where = parse(jobs.Place, place(launcher="job", nodes=3), "place")
    job = jobs.spark_application("prepare-own-1", where, Path("/state"), Path("/state/order.json"))

    kubernetes_server.check(job)
    spec = job["spec"]
    assert spec["executor"]["instances"] == 3
    assert [jobs._cores(cpu) for cpu in ("2", "2.5", "2500m", "500m")] == [2, 2, 2, 0]
    assert spec["executor"]["memory"] == "64g"
    assert spec["driver"]["serviceAccount"] == "seqrec"
    assert Path(spec["mainApplicationFile"].removeprefix("local://")) == Path(launch.__file__)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"launch": {"finetune": {"launcher": "job"}}}, "state_claim"),
        ({"launch": {"finetune": {"nodes": 2}}}, "more than one needs launcher: job"),
        ({"launch": {"evaluate": {}}}, "launch.evaluate: unknown step; known are prepare"),
        ({"user": None, "state_claim": "a", "launch": {"finetune": {"launcher": "job"}}}, "user: jobs"),
    ],
)
def test_wrong_settings_are_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        parse(KubernetesConfig, section, "kubernetes")


def test_a_new_image_makes_a_new_job(tmp_path):
    work = {"data": tmp_path, "validation": tmp_path, "sequences": tmp_path / "out", "dataset": "own"}
    names = {launch.job_name("prepare", work, image) for image in ("seqrec@sha256:1", "seqrec@sha256:2")}
    assert len(names) == 2
    assert launch.job_name("prepare", work | {"dataset": "My_own.v2"}, "seqrec").startswith("prepare-my-own-v2-")
    pod = launch.job_name("pretrain", work | {"model": "x" * 100}, "seqrec") + "-node-0-1000-abcde"
    assert len(pod) <= 63  # JobSet refuses longer ones


def test_an_entry_is_laid_over_the_default():
    assert CLUSTER.step("finetune").cpu == "4"
    assert CLUSTER.step("evaluate") == StepResources(cpu="2", memory="8Gi", retries=3, backoff_s=60)
    assert CLUSTER.step("ingest").retries == 0
    assert KubernetesConfig(resources={"ingest": {"retries": 3}}).step("ingest").retries == 3


def test_what_another_attempt_may_repair_is_raised(finetuned, prepared, initial, tmp_path):
    broken = shutil.copytree(initial, tmp_path / "initial")
    (broken / WEIGHTS).write_bytes(b"torn")
    arguments = {"sequences": prepared, "checkpoint": tmp_path / "out", "filter_seen": True, "config": CONFIG}

    with pytest.raises(DamagedError):
        launch.run_model("finetune", model="sasrec", initial=broken, state=tmp_path / "state", **arguments)
    assert not (tmp_path / "out").exists()


def test_the_reason_of_a_failed_model_is_handed_on_to_the_register(tmp_path, monkeypatch):
    start = {"model": "sasrec", "sequences": tmp_path, "filter_seen": True, "state": tmp_path / "state"}
    start |= {"architecture": {"architecture": "none", "options": {}}, "config": {"epochs": -1}}
    initial, tuned, reports = (tmp_path / name for name in ("initial", "tuned", "reports"))
    launch.run_model("pretrain", initial=initial, **start)
    launch.run_model("finetune", model="sasrec", initial=initial, checkpoint=tuned)
    launch.run_model("evaluate", model="sasrec", checkpoint=tuned, report=reports / "sasrec")

    assert launch.succeeded(["gru4rec", "sasrec"], reports) == ["gru4rec"]
    with pytest.raises(ValueError, match=r"every model failed: sasrec: pretrain: "):
        launch.succeeded(["sasrec"], reports)
    monkeypatch.setenv(launch.PLACE, '{"launch": {"processes": 2}}')
    with pytest.raises(ValueError):  # noqa: PT011  # a job may be retried, so that its failure is raised
        launch.run_model("pretrain", initial=tmp_path / "b", **start)
