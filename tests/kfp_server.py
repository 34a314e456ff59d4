"""A stand-in for the API server of Kubeflow Pipelines, over real HTTP.

Every request and every answer is checked against KFP's published OpenAPI, as the package `kfp-server-api`, which is
generated from it, holds it: operations, query parameters, and each field of each body. A run executes the pipeline
that was received with KFP's local runner.
"""

from __future__ import annotations

import email
import email.policy
import inspect
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlparse

import kfp_server_api as published
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec.pipeline_spec_pb2 import PipelineSpec, PlatformSpec

ROOT = Path(__file__).parent.parent
TOKEN = "the right one"
FORBIDDEN = "somebody-elses"
SERVICES = ("Healthz", "Experiment", "Pipeline", "PipelineUpload", "Run", "RecurringRun")
STATE = "/tmp/seqrec/state"  # a folder of pods
TRACKING = "http://mlflow.example.org"  # of the pods
PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}
RUNNER = """
import json, sys
from kfp.local import SubprocessRunner
from seqrec.pipelines.local import run_package
file, root, given = sys.argv[1:]
run_package(file, root, json.loads(given), SubprocessRunner(use_venv=False))
"""


class Operation(NamedTuple):
    """One operation of the OpenAPI."""

    name: str
    verb: str
    path: re.Pattern[str]
    query: frozenset[str]
    body: str | None  # type
    files: frozenset[str]
    answer: str  # type


class Refused(Exception):  # noqa: N818
    """A request that the server answers with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def operations() -> Iterator[Operation]:
    for service in SERVICES:
        for name, function in inspect.getmembers(getattr(published, f"{service}ServiceApi"), inspect.isfunction):
            if name.endswith("_with_http_info"):
                yield _operation(name.removesuffix("_with_http_info"), inspect.getsource(function))


def _operation(name: str, source: str) -> Operation:
    path, verb = re.search(r"call_api\(\s*'([^']+)', '(\w+)'", source).groups()
    body = re.search(r"body_params = local_var_params\['(\w+)'\]", source)
    return Operation(
        name=name,
        verb=verb,
        path=re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/:]+)", re.escape(path)) + "$"),
        query=frozenset(re.findall(r"query_params.append\(\('([\w.]+)'", source)),
        body=body and re.search(rf":type {body[1]}: (\w+)", source)[1],
        files=frozenset(re.findall(r"local_var_files\['(\w+)'\] =", source)),
        answer=re.search(r"response_type='(\w+)'", source)[1],
    )


OPERATIONS = tuple(operations())


def check(value: Any, kind: str, place: str) -> None:
    """Raise `Refused` unless `value` is a `kind` of the OpenAPI, down to its last field."""
    if value is None:
        return
    if item := re.fullmatch(r"list\[(.+)\]", kind):
        _require(isinstance(value, list), place, "no list")
        for number, one in enumerate(value):
            check(one, item[1], f"{place}[{number}]")
    elif item := re.fullmatch(r"dict\(str, (.+)\)", kind):
        _require(isinstance(value, dict), place, "no mapping")
        for key, one in value.items():
            check(one, item[1], f"{place}.{key}")
    elif kind == "datetime":
        datetime.fromisoformat(value)
    elif kind in PLAIN:
        _require(isinstance(value, PLAIN[kind]), place, f"no {kind}")
    else:
        _check_model(value, getattr(published, kind), place)


def _check_model(value: Any, model: Any, place: str) -> None:
    if allowed := getattr(model, "allowable_values", None):
        _require(value in allowed, place, f"none of {allowed}")
        return
    _require(isinstance(value, dict), place, f"no {model.__name__}")
    kinds = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    for key, one in value.items():
        _require(key in kinds, f"{place}.{key}", f"no field of {model.__name__}")
        check(one, kinds[key], f"{place}.{key}")


def _require(condition: bool, place: str, message: str) -> None:
    if not condition:
        raise Refused(400, f"{place}: {message}")


def documents(spec: Any) -> list[dict[str, Any]]:
    """Return the YAML documents of a pipeline_spec, each checked strictly."""
    both = [spec["pipeline_spec"], spec["platform_spec"]] if "pipeline_spec" in spec else [spec]
    try:
        for content, message in zip(both, (PipelineSpec(), PlatformSpec()), strict=False):
            json_format.ParseDict(content, message)
    except json_format.ParseError as error:
        raise Refused(400, f"pipeline_spec: {error}") from error
    return both


class Server:
    """What the server knows."""

    def __init__(self, folder: Path, *, multi_user: bool) -> None:
        self.folder, self.multi_user = folder, multi_user
        self.experiments: dict[str, dict[str, Any]] = {}
        self.pipelines: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.recurring: dict[str, dict[str, Any]] = {}
        self.seen: list[str] = []  # names of operations

    def answer(self, operation: Operation, path: dict[str, str], query: dict[str, str], body: Any) -> Any:
        self.seen.append(operation.name)
        _require(set(query) <= operation.query, "query", f"no parameter {set(query) - operation.query}")
        if operation.body:
            check(body, operation.body, operation.body)
        if query.get("namespace") == FORBIDDEN or (isinstance(body, dict) and body.get("namespace") == FORBIDDEN):
            raise Refused(403, "may not")
        handler = getattr(self, operation.name, None)
        if handler is None:
            raise Refused(501, f"this stand-in has no {operation.name}")
        result = handler(**path, **{"query": query, "body": body})
        check(result, operation.answer, operation.answer)
        return result

    def healthz_service_get_healthz(self, **_: Any) -> Any:
        return {"multi_user": self.multi_user}

    def experiment_service_list_experiments(self, query: dict[str, str], **_: Any) -> Any:
        wanted = json.loads(query["filter"])["predicates"][0]["stringValue"] if "filter" in query else None
        found = [one for one in self.experiments.values() if wanted in (None, one["display_name"])]
        return {"experiments": found, "total_size": len(found)}

    def experiment_service_create_experiment(self, body: Any, **_: Any) -> Any:
        made = {**body, "experiment_id": str(uuid.uuid4()), "created_at": _now()}
        self.experiments[made["experiment_id"]] = made
        return made

    def run_service_create_run(self, body: Any, **_: Any) -> Any:
        _require(body["experiment_id"] in self.experiments, "experiment_id", "unknown")
        run = {**body, "run_id": str(uuid.uuid4()), "created_at": _now(), "state": "RUNNING"}
        self.runs[run["run_id"]] = run
        threading.Thread(target=self._execute, args=(run,), daemon=True).start()
        return run

    def run_service_get_run(self, run_id: str, **_: Any) -> Any:
        if run_id not in self.runs:
            raise Refused(404, "no such run")
        return self.runs[run_id]

    def upload_pipeline(self, query: dict[str, str], body: Any, **_: Any) -> Any:
        made = {"pipeline_id": str(uuid.uuid4()), "display_name": query["name"], "created_at": _now()}
        self.pipelines[made["pipeline_id"]] = made
        self._add_version(made["pipeline_id"], query["name"], body)
        return made

    def upload_pipeline_version(self, query: dict[str, str], body: Any, **_: Any) -> Any:
        return self._add_version(query["pipelineid"], query["name"], body)

    def _add_version(self, pipeline: str, name: str, body: Any) -> Any:
        made = {
            "pipeline_id": pipeline,
            "pipeline_version_id": str(uuid.uuid4()),
            "display_name": name,
            "created_at": _now(),
        }
        parts = list(yaml.safe_load_all(body))
        documents({"pipeline_spec": parts[0], "platform_spec": parts[1]})
        self.versions[made["pipeline_version_id"]] = made
        return made

    def pipeline_service_list_pipelines(self, query: dict[str, str], **_: Any) -> Any:
        wanted = json.loads(query["filter"])["predicates"][0]["stringValue"]
        found = [one for one in self.pipelines.values() if one["display_name"] == wanted]
        return {"pipelines": found, "total_size": len(found)}

    def pipeline_service_list_pipeline_versions(self, pipeline_id: str, **_: Any) -> Any:
        return {"pipeline_versions": [one for one in self.versions.values() if one["pipeline_id"] == pipeline_id]}

    def recurring_run_service_create_recurring_run(self, body: Any, **_: Any) -> Any:
        _require(body["pipeline_version_reference"]["pipeline_version_id"] in self.versions, "version", "unknown")
        made = {**body, "recurring_run_id": str(uuid.uuid4()), "created_at": _now(), "status": "ENABLED"}
        self.recurring[made["recurring_run_id"]] = made
        return made

    def _execute(self, run: dict[str, Any]) -> None:
        root = self.folder / run["run_id"]
        root.mkdir()
        file = root / "received.yaml"
        text = yaml.safe_dump_all(documents(run["pipeline_spec"]))
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


def _now() -> str:
    return datetime.now(UTC).isoformat()


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def _serve(self) -> None:
        url = urlparse(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            found = [(one, one.path.fullmatch(url.path)) for one in OPERATIONS if one.verb == self.command]
            found = [(one, match) for one, match in found if match]
            _require(len(found) == 1, f"{self.command} {url.path}", "no operation of the OpenAPI")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "who are you?")
            operation, match = found[0]
            body = self._part(content) if operation.files else json.loads(content or "null")
            status, result = 200, self.server.known.answer(operation, match.groupdict(), query, body)
        except Refused as refusal:
            status, result = refusal.status, {"code": refusal.status, "message": str(refusal)}
        text = json.dumps(result).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_DELETE = _serve

    def _part(self, content: bytes) -> str:
        head = f"Content-Type: {self.headers['Content-Type']}\n\n".encode()
        message = email.message_from_bytes(head + content, policy=email.policy.HTTP)
        (part,) = message.iter_parts()
        _require(part.get_param("name", header="content-disposition") == "uploadfile", "form", "no uploadfile")
        return part.get_content() if part.get_content_maintype() == "text" else part.get_payload(decode=True).decode()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path, *, multi_user: bool = False) -> Iterator[tuple[str, Server]]:
    """Yield the address of a running server, and what it knows."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    http.known = Server(folder, multi_user=multi_user)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", http.known
    finally:
        http.shutdown()
        http.server_close()
