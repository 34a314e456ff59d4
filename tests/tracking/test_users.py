"""MLflow's users on a cluster: server and script of deploy/base/mlflow.yaml, run as they stand but for the port."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import requests
import yaml
from mlflow import MlflowClient
from support import ROOT, free_port
from unsynced import EMPTY

from seqrec.config import RegisterConfig
from seqrec.tracking.registry import CHAMPION, alias_version

MANIFEST = ROOT / "deploy/base/mlflow.yaml"
ADMIN, READER = ("seqrec", "a long password"), ("serve", "another password")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of the server, once the script has made the user of the service."""
    folder = tmp_path_factory.mktemp("server")
    documents = yaml.safe_load_all(MANIFEST.read_text())
    (pod,) = [one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment"]
    container = pod["containers"][0]
    (folder / "mlflow.db").write_bytes(EMPTY)
    port = str(free_port())
    values = {
        **{"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/mlflow.db", "ARTIFACTS_DESTINATION": str(folder / "kept")},
        **{"MLFLOW_AUTH_ADMIN_USERNAME": ADMIN[0], "MLFLOW_AUTH_ADMIN_PASSWORD": ADMIN[1]},
        **{"READER_USERNAME": READER[0], "READER_PASSWORD": READER[1], "MLFLOW_FLASK_SERVER_SECRET_KEY": "key"},
    }
    assert set(values) <= {one["name"] for one in container["env"]}
    environment = {**os.environ, **values, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_WORKERS": "1"}
    arguments = [one.replace("5000", port).replace("$(ARTIFACTS_DESTINATION)", "kept") for one in container["args"]]
    command = [sys.executable, "-m", *container["command"], *arguments]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=log, start_new_session=True)
    *_, script = container["lifecycle"]["postStart"]["exec"]["command"]
    twice = 2 * script.replace("localhost:5000", f"localhost:{port}")  # a container started again finds its users
    try:
        subprocess.run([sys.executable, "-c", twice], env=environment, check=True, timeout=120)
        yield f"http://localhost:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


def test_the_service_may_read_the_registry_and_change_nothing(server, tmp_path, monkeypatch):
    def ask(method, path, user, **body):
        return requests.request(method, f"{server}/api/2.0/{path}", json=body, auth=user, timeout=30)

    def done(path, **body):
        answer = ask("POST", f"mlflow/{path}", ADMIN, **body)
        answer.raise_for_status()
        return answer.json()

    name = {"name": "seqrec-own"}
    done("registered-models/create", **name)
    run = done("runs/create", experiment_id="0")["run"]["info"]
    place = f"mlflow-artifacts/artifacts/0/{run['run_id']}/artifacts/model/weights"
    requests.put(f"{server}/api/2.0/{place}", "weights", auth=ADMIN, timeout=30).raise_for_status()
    done("model-versions/create", **name, source=f"{run['artifact_uri']}/model", run_id=run["run_id"])
    done("registered-models/alias", **name, alias=CHAMPION, version="1")

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", READER[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", READER[1])
    assert alias_version(name="seqrec-own", alias=CHAMPION, config=RegisterConfig(tracking_uri=server)) == "1"
    assert MlflowClient(server).download_artifacts(run["run_id"], "model/weights", str(tmp_path))
    for forbidden in (
        ask("POST", "mlflow/registered-models/alias", READER, **name, alias=CHAMPION, version="1"),
        ask("POST", "mlflow/registered-models/set-tag", READER, **name, key="seqrec.claim", value="mine"),
        ask("DELETE", "mlflow/registered-models/delete", READER, **name),
        ask("POST", "mlflow/experiments/set-experiment-tag", READER, experiment_id="0", key="a", value="b"),
    ):
        assert forbidden.status_code == 403
    assert ask("GET", "mlflow/experiments/get?experiment_id=0", None).status_code == 401
