"""A stand-in for the API server of a cluster with Kubeflow Trainer and the Spark operator, over real HTTP.

A job that is created is checked strictly against the published models of its kind, and then really runs: as many
processes as it asks for, with the variables that the operator would set.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml
from kubeflow_spark_api.models import SparkV1beta2SparkApplication
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from support import ROOT, Quiet, free_port, listening

TOKEN, NAMESPACE = "a service account's", "somebodys"
MODELS = {"TrainJob": TrainerV1alpha1TrainJob, "SparkApplication": SparkV1beta2SparkApplication}
PATH = re.compile(r"/apis/(?P<group>[^/]+)/[^/]+/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)(/(?P<name>[^/]+))?")


def check(manifest: dict[str, Any]) -> None:
    """Raise unless every field of `manifest` is one that its kind has, and of the right type."""
    model = MODELS[manifest["kind"]].from_dict(json.loads(json.dumps(manifest)))
    kept = json.loads(json.dumps(model.to_dict(), default=str))
    assert _without_empty(kept) == _without_empty(manifest), "a field was not understood"


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        cleaned = {key: _without_empty(one) for key, one in value.items()}
        return {key: one for key, one in cleaned.items() if one not in (None, {}, [])}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value


class Cluster:
    """The jobs of the cluster."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        self.fail_next = 0  # so many jobs fail without running
        self.lose_next = 0  # so many are complete without running, as if their output had been lost
        self.hang = False  # jobs never end
        self.slow = False  # questions wait for their answer
        self.unavailable = 0  # so many questions for a job are answered with 503

    def create(self, job: dict[str, Any]) -> None:
        check(job)
        self.created.append(job)
        self.jobs[job["metadata"]["name"]] = job
        job["status"] = {}
        threading.Thread(target=self._run, args=(job,), daemon=True).start()

    def _run(self, job: dict[str, Any]) -> None:
        failed = self.fail_next > 0
        if self.hang:
            return
        if failed:
            self.fail_next -= 1
        elif self.lose_next:
            self.lose_next -= 1
        else:
            processes = _processes(job)
            for process in processes:
                process.communicate()
            failed = any(process.returncode for process in processes)
        if job["kind"] == "TrainJob":
            kind = "Failed" if failed else "Complete"
            job["status"] = {"conditions": [{"type": kind, "status": "True", "reason": "it ended", "message": "so"}]}
        else:
            job["status"] = {"applicationState": {"state": "FAILED" if failed else "COMPLETED"}}


def _processes(job: dict[str, Any]) -> list[subprocess.Popen[str]]:
    """Start what the operator would: torchrun on each node with Trainer's PET_* variables, or Spark's driver."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if job["kind"] == "SparkApplication":
        file = job["spec"]["mainApplicationFile"].removeprefix("local://")
        return [_start([sys.executable, file, *job["spec"]["arguments"]], base)]
    trainer = job["spec"]["trainer"]
    assert trainer["command"][0] == "python"
    command = [sys.executable, *trainer["command"][1:], *trainer["args"]]
    own = {one["name"]: one["value"] for one in trainer["env"] if "value" in one}
    shared = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    ranks = range(trainer["numNodes"])
    return [_start(command, base | own | shared | {"PET_NODE_RANK": str(rank)}) for rank in ranks]


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class _Handler(Quiet, BaseHTTPRequestHandler):
    server: Any

    def _serve(self) -> None:
        match = PATH.fullmatch(self.path.partition("?")[0])
        jobs = self.server.cluster.jobs
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.cluster.slow:
            time.sleep(1)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"message": "who are you?"})
        elif match["namespace"] != NAMESPACE:
            self.answer(403, {"message": "not there"})
        elif match["plural"] not in self.server.kinds:
            self.answer(404, {"message": "the server could not find the requested resource"})
        elif self.command == "POST" and json.loads(content)["metadata"]["name"] in jobs:
            self.answer(409, {"message": "there is one of that name"})
        elif self.command == "POST":
            self.server.cluster.create(json.loads(content))
            self.answer(201, json.loads(content))
        elif match["name"] not in jobs:
            self.answer(404, {"message": f'{match["plural"]} "{match["name"]}" not found'})
        elif self.command == "GET" and self.server.cluster.unavailable:
            self.server.cluster.unavailable -= 1
            self.answer(503, {"message": "not now"})
        elif self.command == "PATCH":
            jobs[match["name"]]["metadata"] |= json.loads(content)["metadata"]
            self.answer(200, jobs[match["name"]])
        else:
            self.answer(200, jobs.pop(match["name"]) if self.command == "DELETE" else jobs[match["name"]])

    do_GET = do_POST = do_DELETE = do_PATCH = _serve


@contextmanager
def serving(
    folder: Path, kinds: tuple[str, ...] = ("trainjobs", "sparkapplications")
) -> Iterator[tuple[Path, Cluster]]:
    """Yield a kubectl configuration that points at a running server, and the cluster behind it."""
    file = folder / "kubeconfig"
    with listening(_Handler) as http:
        http.cluster, http.kinds = Cluster(), kinds
        write_config(file, f"http://127.0.0.1:{http.server_port}")
        yield file, http.cluster


def write_config(file: Path, server: str, *, namespace: str = NAMESPACE, token: str = TOKEN) -> None:
    """Write a kubectl configuration."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me", "namespace": namespace}}],
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": token}}],
    }
    file.write_text(yaml.safe_dump(content))
