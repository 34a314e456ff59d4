from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import kfp_server
import mlflow.utils.validation
import pyarrow.parquet as pq
import pytest
import yaml
from google.protobuf import json_format
from kfp.kubernetes.kubernetes_executor_config_pb2 import KubernetesExecutorConfig
from kfp.pipeline_spec.pipeline_spec_pb2 import PipelineDeploymentConfig, PipelineSpec, PlatformSpec
from mlflow import MlflowClient
from support import FILTERED, KUBERNETES, ROOT, figures, with_values, write_cluster_settings, write_settings

from seqrec.artifacts import (
    CASES,
    INTERACTIONS,
    METRICS,
    RECOMMENDATIONS,
    SPLIT_CARD,
    WEIGHTS,
    read_json,
    sha256,
    write_json,
)
from seqrec.cluster import launch
from seqrec.cluster.form import INPUTS
from seqrec.cluster.jobs import Place
from seqrec.cluster.launch import FAILED
from seqrec.commands.run import run
from seqrec.components import stage_steps
from seqrec.config import ConfigError, KubernetesConfig, load, parse
from seqrec.evaluation import leaderboard
from seqrec.pipeline import STAGES
from seqrec.pipelines.__main__ import main
from seqrec.pipelines.compile import Package
from seqrec.pipelines.resources import STATE
from seqrec.pipelines.training import build
from seqrec.serving.events import VARIABLE
from seqrec.tracking.registry import fetch_champion
from seqrec.tracking.runs import FAILURE, OUTCOME

MODELS = ("sasrec",)
BROKEN = "broken"
RESULTS = (*MODELS, *FILTERED)
IMAGE = "registry.example.org/seqrec@sha256:" + "0" * 64
PARAMS = ROOT / "params.yaml"
# The local runner says so of every task: no container, no display names.
pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping:RuntimeWarning", "ignore:Task:UserWarning")


@pytest.fixture(scope="module")
def _offline(forked_steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SEQREC_DATA_MIRROR", raising=False)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            patch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
        yield


@pytest.fixture(scope="module")
def submitted(tmp_path_factory, _offline):
    """A run with a model that fails, submitted through the shell: what the command said, and what the server knows."""
    folder = tmp_path_factory.mktemp("pipeline")
    settings = write_cluster_settings(folder)
    content = yaml.safe_load(settings.read_text())
    content["leaderboard"] = [*MODELS, BROKEN]
    content["models"][BROKEN] = content["models"]["flash4rec"] | {"architecture": "flash4rec"}
    content["models"][BROKEN]["finetune"] = {"learning_rate": 1e30}
    settings.write_text(yaml.safe_dump(content))
    with kfp_server.serving(folder) as (host, server):
        flags = ["--host", host, "--params", str(settings), "--wait", "--poll", "0.5"]
        own = {"SEQREC_IMAGE": IMAGE, "KFP_TOKEN": kfp_server.TOKEN, "OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1"}
        command = [sys.executable, "-m", "seqrec.pipelines", "submit", *flags]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    return folder, done, server


@pytest.fixture(scope="module")
def tasks(submitted):
    """The tasks of one pipeline run, one folder each."""
    return next(submitted[0].glob("*/seqrec-training-*"))


@pytest.fixture(scope="module")
def direct(submitted):
    """The folder of the same stages in one process."""
    folder, _, _ = submitted
    run(config_file=folder / "settings.yaml", out=folder / "direct", changes=f"leaderboard=[{','.join(MODELS)}]")
    return folder / "direct"


def test_a_submitted_run_is_executed_and_awaited(submitted):
    folder, done, server = submitted

    (run,) = server.runs.values()
    assert done.returncode == 0, done.stderr + (folder / run["run_id"] / "log").read_text()
    assert f"run {run['run_id']}" in done.stdout
    assert re.search(rf"http://[^ ]+/#/runs/details/{run['run_id']}", done.stdout)
    assert run["state"] == "SUCCEEDED"
    spec = run["pipeline_spec"]["pipeline_spec"]
    images = {executor["container"]["image"] for executor in spec["deploymentSpec"]["executors"].values()}
    assert images == {IMAGE}


@pytest.mark.parametrize("name", RESULTS)
def test_the_pipeline_gives_the_metrics_of_the_stage_functions(tasks, direct, name):
    folders = [reports / name for reports in (tasks / "register/reports", direct / "reports")]
    found, expected = (read_json(folder / METRICS) for folder in folders)
    assert figures(found) == figures(expected)
    for file in (CASES, RECOMMENDATIONS):
        found, expected = (pq.read_table(folder / file) for folder in folders)
        assert found == expected


def test_numbers_survive_the_way_through_kubeflow(tasks, direct):
    assert read_json(tasks / "prepare/sequences" / SPLIT_CARD) == read_json(direct / "data/sequences" / SPLIT_CARD)
    for model in MODELS:
        found = read_json(of_model(tasks, "finetune", model) / "checkpoint/config.json")
        expected = read_json(direct / "artifacts" / model / "finetuned/config.json")
        assert json.dumps(found["options"]) == json.dumps(expected["options"])  # as text: 2.0 is not 2
        assert json.dumps(found["config"]) == json.dumps(expected["config"])
        assert found["fingerprint"] == expected["fingerprint"]


def test_the_pages_of_the_user_interface_say_how_it_ended_and_need_no_other_file(tasks):
    page = (tasks / "register/page").read_text(encoding="utf-8")

    assert all(name in page for name in RESULTS)
    assert page == (tasks / "register/reports/index.html").read_text(encoding="utf-8")
    assert page.count("<h3>User ") == 4
    assert 'src="' not in page
    assert "there was no champion before" in page
    assert read_json(tasks / "register/reports" / leaderboard.LEADERBOARD)["registry"]["promoted"]
    assert read_json(tasks / "validate/validation/validation.json")["success"]
    assert "<html" in (tasks / "validate/page").read_text(encoding="utf-8").lower()


def of_model(tasks: Path, task: str, model: str) -> Path:
    """Return the folder of a task of `model`."""
    return next(tasks.glob(f"for-loop-*-iteration-{MODELS.index(model)}")) / task


def metadata_of(task: Path, artifact: str) -> dict:
    (output,) = read_json(task / "executor_output.json")["artifacts"][artifact]["artifacts"]
    return output["metadata"]


def test_artifacts_say_what_they_hold(tasks):
    card = read_json(tasks / "prepare/sequences" / SPLIT_CARD)

    data = metadata_of(tasks / "ingest", "data")
    assert data["interactions_sha256"] == card["input_sha256"]
    assert data["count_rows"] == pq.read_metadata(tasks / "ingest/data" / INTERACTIONS).num_rows
    sequences = metadata_of(tasks / "prepare", "sequences")
    assert (sequences["split_sha256"], sequences["count_users"]) == (card["split_sha256"], card["counts"]["users"])
    task = of_model(tasks, "finetune", "sasrec")
    checkpoint = metadata_of(task, "checkpoint")
    assert checkpoint["split_sha256"] == card["split_sha256"]
    assert checkpoint["count_events"] == card["counts"]["events"]  # not the count term's
    assert checkpoint["weights_sha256"] == sha256(task / "checkpoint" / WEIGHTS)


def test_a_model_that_fails_costs_its_row_alone(tasks):
    rows = read_json(tasks / "register/reports" / leaderboard.LEADERBOARD)["rows"]
    assert {row["model"] for row in rows} == set(RESULTS)
    reason = read_json(tasks / "register/reports" / BROKEN / FAILED)["reason"]
    assert reason.startswith("finetune: ")
    assert (
        f"these models failed and are left out of the leaderboard: {BROKEN}: {reason}"
        in (tasks.parent / "log").read_text()
    )


def test_nothing_but_the_tables_is_handed_on_and_figures_have_names_that_mlflow_takes(tasks):
    assert {path.name for path in (tasks / "ingest/data").iterdir()}.isdisjoint({"raw"})
    assert list((tasks / "ingest/raw").rglob("log.csv"))
    named = metadata_of(of_model(tasks, "evaluate", "sasrec"), "metrics")
    assert "test/ndcg_at_10" in named
    for name in {**named, **metadata_of(tasks / "register", "metrics")}:
        mlflow.utils.validation._validate_metric_name(name)


def recorded(settings: Path) -> list[dict[str, str]]:
    client = MlflowClient(load(settings).section("register").tracking_uri)
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return [{**one.data.tags, "status": one.info.status} for one in runs if OUTCOME in one.data.tags]


def test_the_run_that_register_made_says_how_the_pipeline_ended(tasks):
    (tags,) = recorded(tasks.parent.parent / "settings.yaml")

    assert (tags[OUTCOME], tags[FAILURE], tags["status"]) == ("SUCCEEDED", "", "FINISHED")
    assert tags["mlflow.runName"].startswith("own-")


def test_without_a_champion_its_folder_holds_a_note(tasks, tmp_path):
    config = load(tasks.parent.parent / "settings.yaml").section("register")

    assert fetch_champion(dataset="another", folder=tmp_path / "another", config=config) == ""
    (note,) = (tmp_path / "another").iterdir()  # an object store would drop an empty folder
    assert "no champion" in note.read_text()


def test_a_file_in_place_of_a_folder_is_named(tmp_path, capsys):
    settings = write_settings(tmp_path, start=0)

    assert main(["run-local", "--params", str(settings), "--out", str(settings / "root")]) == 1
    assert capsys.readouterr().err == f"run-local: {settings} is a file, but must be a folder\n"


@pytest.mark.usefixtures("_offline")
def test_a_failed_validation_stops_the_run_before_any_training(tmp_path, capsys):
    settings = write_settings(tmp_path, start=0)  # 1970, before validate.min_date

    assert main(["run-local", "--params", str(settings), "--out", str(tmp_path / "root")]) == 1

    said = capsys.readouterr()
    ended = re.findall(r"Task \S*'([\w-]+)'\S* finished with status \S*(SUCCESS|FAILURE)", said.out)
    expected = [("settings", "SUCCESS"), ("ingest", "SUCCESS"), ("validate", "FAILURE"), ("record", "SUCCESS")]
    assert [one for one in ended if one[0] != "exit-handler-1"] == expected
    assert len(said.out.splitlines()) < 10
    assert f"See {tmp_path}/root/log.txt" in said.err
    assert "validate.min_date" in (tmp_path / "root/log.txt").read_text()
    tasks = next((tmp_path / "root").glob("seqrec-training-*"))
    assert {folder.name for folder in tasks.iterdir()} == {"settings", "ingest", "validate", "record"}
    (tags,) = recorded(settings)
    assert (tags[OUTCOME], tags["status"]) == ("FAILED", "FAILED")
    assert tags[FAILURE]
    assert not read_json(tasks / "validate/validation/validation.json")["success"]


CLUSTER = {"plain": {"user": None}, "gpu": KUBERNETES}
CLUSTER["nodes"] = CLUSTER["gpu"] | {
    "launch": {
        "finetune": {"launcher": "job", "nodes": 2, "processes": 4},
        "pretrain": {"launcher": "step", "processes": 2},
    },
    "parallelism": 2,
}
CLUSTER["other nodes"] = with_values(
    CLUSTER["nodes"], {"resources.finetune.tolerations": [], "labels": {"team": "ads"}}
)
CLUSTER["loop"] = CLUSTER["gpu"] | {"secrets": {"seqrec-serve": {"store": VARIABLE}}}  # and ingest.events
PIPELINES = [("training", "plain"), ("retraining", "loop"), ("pretraining", "gpu")]
COMPILED = [*PIPELINES, ("training", "gpu"), ("training", "nodes")]


@functools.cache
def compiled(pipeline: str, cluster: str) -> list[dict]:
    """Return the YAML documents of a pipeline on params.yaml with another section `kubernetes`."""
    content = yaml.safe_load(PARAMS.read_text(encoding="utf-8"))
    content["kubernetes"] = CLUSTER[cluster]
    content["datasets"]["ml-100k"]["ingest"] = {"events": cluster == "loop"}
    models = ["recformer_text"] if pipeline == "pretraining" else list(MODELS)
    content["sources"] = ["health"] if pipeline == "pretraining" else []
    with tempfile.TemporaryDirectory() as scratch:
        output, params = Path(scratch, "out.yaml"), Path(scratch, "params.yaml")
        params.write_text(yaml.safe_dump(content))
        Package(models=models, params=params, pipeline=pipeline).compile(output)
        return list(yaml.load_all(output.read_text(encoding="utf-8"), yaml.CSafeLoader))


def tasks_of(document: dict) -> dict[str, dict]:
    """Return the tasks inside the exit handler, and inside the loop over models, by what the user interface shows."""
    dags = [part["dag"]["tasks"] for part in document["components"].values() if "dag" in part]
    return {task["taskInfo"]["name"]: task for dag in dags for task in dag.values()}


def executor_of(documents: list[dict], task: str | dict) -> tuple[dict, dict]:
    """Return the container of a task, given itself or by its name, and what the cluster must know of it."""
    task = tasks_of(documents[0])[task] if isinstance(task, str) else task
    label = documents[0]["components"][task["componentRef"]["name"]]["executorLabel"]
    container = documents[0]["deploymentSpec"]["executors"][label]["container"]
    return container, documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"][label]


@pytest.mark.parametrize(("pipeline", "cluster"), COMPILED)
def test_a_compiled_pipeline_has_no_field_that_kubeflow_does_not_know_and_its_steps_keep_the_rules(pipeline, cluster):
    documents = compiled(pipeline, cluster)

    assert json_format.ParseDict(documents[0], PipelineSpec()).pipeline_info.name == f"seqrec-{pipeline}"
    json_format.ParseDict(documents[0]["deploymentSpec"], PipelineDeploymentConfig())  # above any mapping will do
    json_format.ParseDict(documents[1], PlatformSpec())
    executors = documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert set(executors) == set(documents[0]["deploymentSpec"]["executors"])
    for executor in executors.values():
        json_format.ParseDict(executor, KubernetesExecutorConfig())
    names, section = set(CLUSTER[cluster].get("environment", {})), parse(KubernetesConfig, CLUSTER[cluster], "")
    for name, task in (tasks_of(documents[0]) | documents[0]["root"]["dag"]["tasks"]).items():
        component = task["componentRef"]["name"]
        if "dag" in documents[0]["components"][component]:
            continue
        container, executor = executor_of(documents, task)
        assert container["image"] == "seqrec:latest"
        assert "pip install" not in str(container["command"])
        assert {variable["name"] for variable in container.get("env", [])} == names  # a secret is named, not told
        told = [key["envVar"] for secret in executor.get("secretAsEnv", []) for key in secret["keyToEnv"]]
        assert told == [variable for keys in section.secrets.values() for variable in keys.values()]
        user = {"runAsUser": "10001", "runAsGroup": "10001"} if section.user else {}
        assert executor["securityContext"] == {**user, "runAsNonRoot": True}
        assert "/tmp" in [mount["mountPath"] for mount in executor["emptyDirMounts"]]
        keeps = section.state_claim and "state" in task["inputs"].get("parameters", {})
        assert (STATE in [mount["mountPath"] for mount in executor.get("pvcMount", [])]) is bool(keeps)
        assert "cachingOptions" in task, f"{name} would be cached by the server's default"
        step = component.removeprefix("comp-").split("-")[0]
        wanted = section.step({"model": "settings"}.get(step, step))
        assert task.get("retryPolicy", {}).get("maxRetryCount", 0) == wanted.retries
        if wanted.retries:
            assert {"backoffDuration", "backoffFactor"} <= set(task["retryPolicy"])
            window = int(task["retryPolicy"]["backoffMaxDuration"].removesuffix("s"))
            assert window > (wanted.retries + 1) * (wanted.timeout_s or 30 * 86_400)
        given = [value for value in task["inputs"].get("parameters", {}).values() if "runtimeValue" in value]
        assert len(json.dumps(given)) < 2**17  # the longest argument of a process on Linux
    assert len(yaml.safe_dump_all(documents)) < 2**20  # etcd takes no larger object
    limit = tasks_of(documents[0])["models"].get("iteratorPolicy", {}).get("parallelismLimit", 0)
    assert limit == section.parallelism


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_has_a_task(stage):
    tasks = tasks_of(compiled("training", "plain")[0])
    assert stage.name in tasks, f"pipelines/training.py lacks a task of stage_steps.{stage.name}"


def test_a_step_asks_for_what_the_section_says():
    documents = compiled("training", "gpu")

    container, executor = executor_of(documents, "finetune")
    assert container["resources"]["resourceCpuRequest"] == "4"
    assert container["resources"]["resourceMemoryLimit"] == "64Gi"
    accelerator = container["resources"]["accelerator"]
    assert (accelerator["resourceCount"], accelerator["resourceType"]) == ("1", "nvidia.com/gpu")
    assert container["env"] == [{"name": "OMP_NUM_THREADS", "value": "1"}]
    assert executor["nodeSelector"]["labels"] == {"pool": "gpu"}
    assert [one["key"] for one in executor["tolerations"]] == ["nvidia.com/gpu"]
    assert executor["emptyDirMounts"][0]["mountPath"] == "/dev/shm"
    assert [one["mountPath"] for one in executor["pvcMount"]] == [STATE]
    assert executor["activeDeadlineSeconds"] == "3600"

    container, executor = executor_of(documents, "ingest")
    assert "accelerator" not in container["resources"]
    assert [one["mountPath"] for one in executor["pvcMount"]] == [STATE, "/data"]
    assert executor["podMetadata"]["labels"] == {"team": "search"}
    assert tasks_of(documents[0])["finetune"]["retryPolicy"]["backoffDuration"] == "60s"


def test_a_step_that_awaits_a_job_books_no_gpu_itself():
    documents = compiled("training", "nodes")
    container, executor = executor_of(documents, "finetune")

    assert "accelerator" not in container["resources"]
    assert "nodeSelector" not in executor
    assert executor["activeDeadlineSeconds"] == "3600"  # as long as the job may take
    given = place_of(executor)
    assert given["launch"]["nodes"] == 2
    assert given["resources"]["gpus"] == 1
    assert given["cluster"]["state_claim"] == "seqrec-state"
    assert place_of(executor_of(documents, "pretrain")[1]) == {"launch": {"processes": 2}}


def place_of(executor: dict) -> dict:
    """Return what the step reads of its pod, as the kubelet gives it to the step."""
    (variable,) = executor["fieldPathAsEnv"]
    assert variable["name"] == launch.PLACE
    (name,) = re.fullmatch(r"metadata\.annotations\['(.+)'\]", variable["fieldPath"]).groups()
    text = executor["podMetadata"]["annotations"][name]
    assert "{{" not in text  # Argo would take it for a template
    parse(Place, json.loads(text), "place")
    return json.loads(text)


def test_what_a_step_asks_of_the_cluster_is_no_input_of_it():
    """Another toleration must not repeat a training that KFP has cached by image, command, inputs and claims."""
    before, after = compiled("training", "nodes"), compiled("training", "other nodes")

    assert after[0] == before[0]
    assert place_of(executor_of(after, "finetune")[1]) != place_of(executor_of(before, "finetune")[1])


def test_only_what_may_differ_from_run_to_run_is_never_cached():
    found = []
    for names in PIPELINES:
        tasks = tasks_of(compiled(*names)[0])
        steps = {name: task for name, task in tasks.items() if "parameterIterator" not in task}
        found.append({name for name, task in steps.items() if not task["cachingOptions"].get("enableCache")})

    training = {"settings", "register"}
    assert found == [training, training | {"champion", "collect"}, {"settings", "settings health"}]


def test_pretraining_learns_from_the_sources_and_is_measured_on_the_dataset():
    tasks = tasks_of(compiled("pretraining", "gpu")[0])

    assert {"validate health", "join health", "pretrain", "evaluate"} <= set(tasks)
    assert not {name for name in tasks if name.startswith(("finetune", "register"))}
    assert tasks["pretrain"]["inputs"]["artifacts"]["data"]["componentInputArtifact"] == "pipelinechannel--join-joined"
    assert tasks["evaluate"]["inputs"]["parameters"]["alone"]["runtimeValue"]["constant"] is True


def test_a_failed_model_fails_the_run_if_no_register_follows(tmp_path):
    write_json(tmp_path / "checkpoint" / FAILED, {"reason": "no text"})
    names = ("checkpoint", "sequences", "report", "metrics")
    artifacts = {name: SimpleNamespace(path=str(tmp_path / name)) for name in names}

    with pytest.raises(ValueError, match="own: no text"):
        stage_steps.evaluate.python_func(model="own", filter_seen=True, config={}, alone=True, **artifacts)


@pytest.mark.parametrize(
    ("sources", "models", "refit", "message"),
    [
        ([], ["recformer_text"], "none", "sources: name the datasets"),
        (["health"], ["recformer"], "none", r"models\.recformer: .* encoder text"),
        (["health"], ["recformer_text"], "valid", r"evaluate\.refit: pipeline `pretraining` trains nothing"),
    ],
)
def test_pretraining_refuses_what_it_cannot_do(tmp_path, sources, models, refit, message):
    content = yaml.safe_load(PARAMS.read_text(encoding="utf-8")) | {"sources": sources, "evaluate": {"refit": refit}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))

    with pytest.raises(ConfigError, match=message):
        build("pretraining", load(tmp_path / "params.yaml"), models)


@pytest.mark.parametrize(("pipeline", "cluster"), PIPELINES)
def test_the_form_is_small_and_says_what_each_input_is(pipeline, cluster):
    (document, _) = compiled(pipeline, cluster)
    form = document["root"]["inputDefinitions"]["parameters"]

    assert {name: one["description"] for name, one in form.items()} == INPUTS
    tasks = [*tasks_of(document).values(), *document["root"]["dag"]["tasks"].values()]
    values = [value for task in tasks for value in task.get("inputs", {}).get("parameters", {}).values()]
    read = {value.get("componentInputParameter", "").removeprefix("pipelinechannel--") for value in values}
    assert set(form) <= read
