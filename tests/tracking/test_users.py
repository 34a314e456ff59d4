"""MLflow's users on a cluster: server and script of deploy/base/mlflow.yaml, run as they stand but for the port."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import requests
import yaml
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
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
    _, *script = container["lifecycle"]["postStart"]["exec"]["command"]
    script = [one.replace("localhost:5000", f"localhost:{port}") for one in script]
    try:
        for _ in range(2):  # a container that is started again finds its users
            subprocess.run([sys.executable, *script], env=environment, check=True, timeout=120)
        yield f"http://localhost:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


def client(server, user, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", user[1])
    return MlflowClient(server)


def test_the_service_may_read_the_registry_and_change_nothing(server, tmp_path, monkeypatch):
    steps = client(server, ADMIN, monkeypatch)
    steps.create_registered_model("seqrec-own")
    run = steps.create_run("0").info
    steps.log_text(run.run_id, "weights", "model/weights")
    steps.create_model_version("seqrec-own", source=f"{run.artifact_uri}/model", run_id=run.run_id)
    steps.set_registered_model_alias("seqrec-own", "champion", "1")

    reader = client(server, READER, monkeypatch)
    assert alias_version(name="seqrec-own", alias=CHAMPION, config=RegisterConfig(tracking_uri=server)) == "1"
    assert reader.download_artifacts(run.run_id, "model/weights", str(tmp_path))
    for forbidden in (
        lambda: reader.set_registered_model_alias("seqrec-own", "champion", "1"),
        lambda: reader.set_registered_model_tag("seqrec-own", "seqrec.claim", "mine"),
        lambda: reader.delete_registered_model("seqrec-own"),
        lambda: reader.set_experiment_tag("0", "a", "b"),
    ):
        with pytest.raises(MlflowException, match=r"403|[Pp]ermission"):
            forbidden()
    assert requests.get(f"{server}/api/2.0/mlflow/experiments/get?experiment_id=0", timeout=30).status_code == 401
