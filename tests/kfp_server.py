"""A stand-in for the API server of Kubeflow Pipelines, over real HTTP, for the requests of KFP's own client.

A run executes the pipeline that was received with KFP's local runner.
"""

from __future__ import annotations

import email
import email.policy
import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml
from support import ROOT, Quiet, listening

from seqrec.pipelines.resources import STATE

TOKEN = "the right one"
FORBIDDEN = "somebody-elses"
TRACKING = "http://mlflow.example.org"  # of the pods
RUNNER = """
import json, sys
from kfp.local import SubprocessRunner
from kfp.local.io import IOStore
from seqrec.pipelines.local import run_package
IOStore.get_task_status = lambda *_: "COMPLETE"  # what the backend tells an exit task, and never an error
file, root, given = sys.argv[1:]
run_package(file, root, json.loads(given), SubprocessRunner(use_venv=False))
"""
API = "/apis/v2beta1"
DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
ROUTES = {  # request -> method of the server
    f"GET {API}/healthz": "health",
    f"GET {API}/experiments": "experiments_named",
    f"POST {API}/experiments": "create_experiment",
    f"POST {API}/runs": "create_run",
    f"GET {API}/runs/(?P<run_id>[^/]+)": "run",
    f"GET {API}/pipelines": "pipelines_named",
    f"GET {API}/pipelines/(?P<pipeline>[^/]+)/versions": "versions_of",
    f"POST {API}/pipelines/upload": "upload",
    f"POST {API}/pipelines/upload_version": "upload_version",
    f"POST {API}/recurringruns": "create_recurring_run",
    f"GET {API}/recurringruns": "recurring_runs_named",
    f"DELETE {API}/recurringruns/(?P<recurring>[^/]+)": "delete_recurring_run",
}


class Refused(Exception):  # noqa: N818
    """A request that the server answers with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """What the server knows, and an answer to each route."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.multi_user = folder, False
        self.experiments: dict[str, dict[str, Any]] = {}
        self.pipelines: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.recurring: dict[str, dict[str, Any]] = {}
        self.seen: list[str] = []  # requests
        self.fail_next: list[int] = []  # statuses of the next answers to questions about a run

    def answer(self, request: str, query: dict[str, str], body: Any) -> Any:
        self.seen.append(request)
        found = [(name, match) for route, name in ROUTES.items() if (match := re.fullmatch(route, request))]
        if not found:
            raise Refused(501, f"this stand-in has no {request}")
        if FORBIDDEN in (query.get("namespace"), body.get("namespace") if isinstance(body, dict) else None):
            raise Refused(403, "may not")
        ((name, match),) = found
        return getattr(self, name)(query=query, body=body, **match.groupdict())

    def health(self, **_: Any) -> Any:
        return {"multi_user": self.multi_user}

    def experiments_named(self, query: dict[str, str], **_: Any) -> Any:
        return {"experiments": _named(self.experiments, query)}

    def create_experiment(self, body: Any, **_: Any) -> Any:
        return _made(self.experiments, "experiment_id", body)

    def create_run(self, body: Any, **_: Any) -> Any:
        run = _made(self.runs, "run_id", {**body, "state": "RUNNING"})
        threading.Thread(target=self._execute, args=(run,), daemon=True).start()
        return run

    def run(self, run_id: str, **_: Any) -> Any:
        if self.fail_next:
            raise Refused(self.fail_next.pop(0), "not now")
        return self.runs[run_id]

    def pipelines_named(self, query: dict[str, str], **_: Any) -> Any:
        found = _named(self.pipelines, query)
        return {"pipelines": found, "total_size": len(found)}

    def versions_of(self, pipeline: str, **_: Any) -> Any:
        return {"pipeline_versions": [one for one in self.versions.values() if one["pipeline_id"] == pipeline]}

    def upload(self, query: dict[str, str], body: Any, **_: Any) -> Any:
        about = {"display_name": query["name"], "namespace": query.get("namespace", "")}
        if any(about.items() <= one.items() for one in self.pipelines.values()):
            raise Refused(409, "there is one of that name")
        made = _made(self.pipelines, "pipeline_id", about)
        self.upload_version({"pipelineid": made["pipeline_id"], "name": query["name"]}, body)
        return made

    def upload_version(self, query: dict[str, str], body: Any, **_: Any) -> Any:
        assert len(list(yaml.safe_load_all(body))) == 2  # the pipeline, and what is for Kubernetes
        if not DNS_NAME.fullmatch(query["name"]):
            raise Refused(400, f"{query['name']}: not a DNS name")  # where pipelines are stored in Kubernetes
        about = {"pipeline_id": query["pipelineid"], "display_name": query["name"]}
        return _made(self.versions, "pipeline_version_id", about)

    def create_recurring_run(self, body: Any, **_: Any) -> Any:
        assert body["pipeline_version_reference"]["pipeline_version_id"] in self.versions
        about = {"status": "ENABLED", "namespace": self.experiments[body["experiment_id"]].get("namespace", "")}
        return _made(self.recurring, "recurring_run_id", {**body, **about})

    def recurring_runs_named(self, query: dict[str, str], **_: Any) -> Any:
        return {"recurringRuns": _named(self.recurring, query)}

    def delete_recurring_run(self, recurring: str, **_: Any) -> Any:
        del self.recurring[recurring]
        return {}

    def _execute(self, run: dict[str, Any]) -> None:
        root = self.folder / run["run_id"]
        root.mkdir()
        file = root / "received.yaml"
        spec = run["pipeline_spec"]
        text = yaml.safe_dump_all([spec["pipeline_spec"], spec["platform_spec"]])
        database = f"sqlite:///{self.folder}/mlflow.db"  # in place of the tracking server
        file.write_text(text.replace(STATE, str(root / "state")).replace(TRACKING, database))
        given = run.get("runtime_config", {}).get("parameters", {})
        command = [sys.executable, "-c", RUNNER, str(file), str(root), json.dumps(given)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": database}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        (root / "log").write_text(done.stdout + done.stderr)
        if done.returncode:
            run["error"] = {"code": 1, "message": done.stderr.strip().splitlines()[-1]}
        run["state"] = "FAILED" if done.returncode else "SUCCEEDED"


def _named(known: dict[str, dict[str, Any]], query: dict[str, str]) -> list[dict[str, Any]]:
    wanted = json.loads(query["filter"])["predicates"][0]["stringValue"] if "filter" in query else None
    found = [one for one in known.values() if wanted in (None, one["display_name"])]
    return [one for one in found if one.get("namespace", "") == query.get("namespace", "")]


def _made(known: dict[str, dict[str, Any]], key: str, content: dict[str, Any]) -> dict[str, Any]:
    made = {**content, key: str(uuid.uuid4()), "created_at": datetime.now(UTC).isoformat()}
    known[made[key]] = made
    return made


class _Handler(Quiet, BaseHTTPRequestHandler):
    server: Any

    def _serve(self) -> None:
        url = urlparse(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "who are you?")
            body = self._part(content) if "/upload" in url.path else json.loads(content or "null")
            status, result = 200, self.server.known.answer(f"{self.command} {url.path}", query, body)
        except Refused as refusal:
            status, result = refusal.status, {"code": refusal.status, "message": str(refusal)}
        self.answer(status, result)

    do_GET = do_POST = do_DELETE = _serve

    def _part(self, content: bytes) -> str:
        head = f"Content-Type: {self.headers['Content-Type']}\n\n".encode()
        (part,) = email.message_from_bytes(head + content, policy=email.policy.HTTP).iter_parts()
        return part.get_content() if part.get_content_maintype() == "text" else part.get_payload(decode=True).decode()


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, Server]]:
    """Yield the address of a running server, and what it knows."""
    with listening(_Handler) as http:
        http.known = Server(folder)
        yield f"http://127.0.0.1:{http.server_port}", http.known
