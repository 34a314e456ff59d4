"""The image and the pipeline in it, with a real Docker daemon: `make test-containers`."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import docker
import pytest
import requests
import yaml
from mlflow import MlflowClient
from support import ROOT, YEAR_2001, free_port, save, save_bert, synthetic_rows, write_log

from seqrec.config import RegisterConfig
from seqrec.data import item_tokens
from seqrec.pipelines.local import HARDENED
from seqrec.serving.recommender import Recommender
from seqrec.tracking import registry, runs
from seqrec.tracking.runs import FAILURE, OUTCOME
from seqrec.training.checkpoint import load_checkpoint

IMAGE = os.environ.get("SEQREC_IMAGE", "seqrec:test")
SMALL = {"d_model", "d_shared", "d_value", "d_expert", "d_inner", "d_state", "d_user"}  # options, where it has them
pytestmark = [pytest.mark.containers, pytest.mark.filterwarnings("ignore")]


def models() -> dict[str, dict]:
    """Return every model of params.yaml, made small."""
    entries = yaml.safe_load((ROOT / "params.yaml").read_text())["models"]
    for entry in entries.values():
        entry["options"] |= dict.fromkeys(SMALL & entry["options"].keys(), 16) | {"length": 12}
        entry["options"] |= {"vocabulary": 300} if "vocabulary" in entry["options"] else {}
        for stage in ("pretrain", "finetune"):
            entry[stage] = entry.get(stage, {}) | {"epochs": 1, "batch_size": 16}
            entry[stage] |= {"prefixes_per_user": 2} if "prefixes_per_user" in entry[stage] else {}
    return entries


def write_settings(folder: Path, *, start: int = YEAR_2001, chosen: tuple[str, ...] = (), epochs: int = 1) -> Path:
    """Write a log of 60 users with titles, and settings that train `chosen`, or every model, on it."""
    folder.mkdir()
    rows = synthetic_rows()
    write_log(folder / "log.csv", rows, start=start)
    described = [(item, f"Title of {item}", f"kind {item[-1]}") for item in sorted({row[1] for row in rows})]
    with (folder / "items.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["item_id", "title", "kind"])
        writer.writerows(described)
    entries = models()
    texts = item_tokens.as_texts([{"title": title, "kind": kind} for _, title, kind in described])
    entries["unisrec"]["options"]["start"] = save_bert(texts, folder / "bert")[0]  # the containers are offline
    (folder / "bert" / "model.safetensors").chmod(0o644)  # and have a user of their own
    chosen = chosen or tuple(entries)
    for name in chosen:
        entries[name]["finetune"]["epochs"] = epochs
    content = {
        "dataset": "own",
        "leaderboard": list(chosen),
        "ingest": {"source": "csv", "interactions": str(folder / "log.csv"), "items": str(folder / "items.csv")},
        "finetune": {"warmup_steps": 1, "save_steps": 5, "patience": 10_000},
        "evaluate": {"bootstrap": 100},
        "register": {"allow_below_baseline": True},  # an epoch teaches little
        "kubernetes": {
            "resources": {"default": {"retries": 0}, "finetune": {"retries": 1, "backoff_s": 1}},
            "environment": {"OMP_NUM_THREADS": "1"},  # threads wait for each other longer than such models compute
        },
        "models": {name: entries[name] for name in chosen},
    }
    params = folder / "settings.yaml"
    params.write_text(yaml.safe_dump(content))
    return params


def run(params: Path, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the pipeline with the Docker runner: offline, read-only, without capabilities, as the image's user."""
    out.mkdir()
    command = [sys.executable, "-m", "seqrec.pipelines", "run-local", "--docker", "--data", str(params.parent)]
    command += ["--params", str(params), "--out", str(out), *flags]
    environment = {**os.environ, "SEQREC_IMAGE": IMAGE}
    for name in ("MLFLOW_TRACKING_URI", "SEQREC_DATA_MIRROR"):
        environment.pop(name, None)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def steps_of(client, out: Path) -> list:
    """Return the containers, running or not, of the pipeline that writes to `out`."""
    found = client.containers.list(all=True, filters={"ancestor": IMAGE})
    return [one for one in found if any(mount["Source"] == str(out) for mount in one.attrs["Mounts"])]


def outcomes(out: Path) -> list[dict[str, str]]:
    client = MlflowClient(f"sqlite:///{out}/mlflow.db")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return [one.data.tags for one in runs if OUTCOME in one.data.tags]


@pytest.fixture(scope="module", autouse=True)
def client():
    docker_ = docker.from_env()
    assert docker_.images.get(IMAGE), "build the image first: make test-containers"
    return docker_


def inside(client, command: list[str]) -> str:
    options = {**HARDENED, "network_mode": "none"}
    return client.containers.run(IMAGE, command[1:], entrypoint=command[:1], remove=True, **options).decode()


def test_the_image_is_not_root_and_has_a_bill_of_materials(client):
    content = client.images.get(IMAGE).attrs["Config"]

    assert content["User"] == "10001:10001"
    assert content["Labels"]["org.opencontainers.image.licenses"] == "MIT"
    bill = json.loads(inside(client, ["cat", "/opt/venv/sbom.cdx.json"]))
    assert bill["bomFormat"] == "CycloneDX"
    assert {"torch", "kfp", "mlflow"} <= {one["name"] for one in bill["components"]}


def test_a_container_can_write_nowhere_but_below_tmp(client):
    said = inside(client, ["sh", "-c", "id -u; touch /app/x /opt/x 2>&1; touch /tmp/x && echo written"])

    assert said.startswith("10001")
    assert said.count("Read-only file system") == 2
    assert said.strip().endswith("written")


def test_the_image_holds_what_every_command_imports(client):
    modules = "seqrec.serving.http, seqrec.serving.approximate_search, mlflow, onnxscript, psycopg, boto3, transformers"
    assert inside(client, ["python", "-c", f"import {modules}; print('all there')"]).endswith("all there\n")


def answered(address: str, **request) -> requests.Response | None:
    """Return the answer of a service, once it has started."""
    for _ in range(120):
        with contextlib.suppress(requests.ConnectionError):
            return requests.post(address, timeout=10, **request)
        time.sleep(1)
    return None


def test_the_image_serves_the_champion_of_a_mounted_registry(client, prepared, tmp_path):
    """As the user whose files these are, offline but for the loopback, on a file system that cannot be written."""
    config = RegisterConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    mlflow_ = runs.connect(config)
    folder = save("sasrec", prepared, tmp_path / "saved", model="sasrec", fingerprint="f")
    run_ = runs.open_run(mlflow_, runs.experiment(mlflow_, config), "f", "sasrec")
    logged = registry.log_model(mlflow_, run_, checkpoint=load_checkpoint(folder))
    registry.crown(mlflow_, registry.create_version(mlflow_, "seqrec-own", logged, {}), None, "a test")
    address = f"127.0.0.1:{free_port()}"

    container = client.containers.run(
        IMAGE,
        ["serve", "--saved", "models:/seqrec-own@champion", "--port", address.partition(":")[2], "--drain-s", "0"],
        environment={"MLFLOW_TRACKING_URI": str(config.tracking_uri)},
        volumes={str(tmp_path): {"bind": str(tmp_path), "mode": "ro"}},
        detach=True,
        **{**HARDENED, "network_mode": "host", "user": f"{os.getuid()}:{os.getgid()}"},
    )
    try:
        answer = answered(f"http://{address}/recommend", json={"history": ["i1", "i2"], "k": 3})
        assert answer is not None, container.logs().decode()
        container.stop(timeout=60)
        status = container.wait()["StatusCode"]
    finally:
        container.remove(force=True)
    assert answer.json()["items"] == Recommender.load(folder).recommend(["i1", "i2"], 3).items
    assert status == 0


def test_the_whole_pipeline_runs_in_containers_with_every_model(client, tmp_path):
    done = run(write_settings(tmp_path / "data"), tmp_path / "out")

    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (board,) = (tmp_path / "out").rglob("register/reports/leaderboard.json")
    rows = json.loads(board.read_text())["rows"]
    assert set(models()) <= {row["model"] for row in rows}
    owners = {path.stat().st_uid for path in board.parent.rglob("*")}
    assert owners == ({10001} if os.getuid() == 0 else {os.getuid()})
    assert [tags[OUTCOME] for tags in outcomes(tmp_path / "out")] == ["SUCCEEDED"]
    assert steps_of(client, tmp_path / "out") == []


def test_a_text_model_learns_from_other_datasets_alone(tmp_path):
    params = write_settings(tmp_path / "data", chosen=("recformer_text",))
    content = yaml.safe_load(params.read_text())
    content |= {"sources": ["other"], "datasets": {"other": {"ingest": content["ingest"]}}}
    params.write_text(yaml.safe_dump(content))

    done = run(params, tmp_path / "out", "--pipeline", "pretraining")

    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (metrics,) = tmp_path.rglob("report/metrics.json")
    assert json.loads(metrics.read_text())["test/ndcg@10"] > 0


def test_a_failing_step_fails_the_pipeline(tmp_path):
    params = write_settings(tmp_path / "data", start=0, chosen=("sasrec",))  # 1970, before validate.min_date

    done = run(params, tmp_path / "out")

    assert done.returncode == 1, done.stdout[-2000:]
    assert "critical rules failed" in done.stdout
    assert not list((tmp_path / "out").rglob("sequences.arrow"))
    (tags,) = outcomes(tmp_path / "out")
    assert (tags[OUTCOME], "failed" in tags[FAILURE]) == ("FAILED", True)


def test_a_killed_training_goes_on_where_it_stood(client, tmp_path):
    out = tmp_path / "out"
    params = write_settings(tmp_path / "data", chosen=("sasrec",), epochs=100)
    killed = []

    def kill() -> None:
        """Kill the container that trains as soon as it has saved a state of its second epoch."""
        while not killed:
            steps = [int(path.name.removeprefix("step-")) for path in (out / "state").glob("*/step-*")]
            if steps and max(steps) > 5:
                for container in steps_of(client, out):
                    container.kill()
                    killed.append(max(steps))
            time.sleep(0.05)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    done = run(params, out)

    assert killed
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert re.search(r"resuming \S+ finetune at epoch", done.stdout)
    (history,) = out.rglob("checkpoint/history.jsonl")
    assert len(history.read_text().splitlines()) == 100
