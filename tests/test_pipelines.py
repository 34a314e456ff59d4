from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from conftest import synthetic_rows
from google.protobuf import json_format
from kfp import local
from kfp.pipeline_spec.pipeline_spec_pb2 import PipelineSpec

from pipelines.__main__ import main
from pipelines.compile import compile_pipeline
from pipelines.training import parameters, training_pipeline
from seqrec import leaderboard
from seqrec.artifacts import CASES, METRICS, RECOMMENDATIONS, SPLIT_CARD, read_json
from seqrec.config import ConfigError, load
from seqrec.run import load_config
from seqrec.stages.baselines import baselines
from seqrec.stages.evaluate import evaluate
from seqrec.stages.finetune import finetune
from seqrec.stages.ingest import ingest
from seqrec.stages.prepare import prepare
from seqrec.stages.pretrain import pretrain
from seqrec.stages.validate import validate

MODELS = ("sasrec", "flash4rec")
RESULTS = (*MODELS, *leaderboard.BASELINES)
SECONDS = ("train_seconds", "evaluate_seconds")
PARAMS = Path(__file__).parent.parent / "params.yaml"
YEAR_2001 = 978_307_200
# The local runner says so of every task: no container, no display names.
pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping:RuntimeWarning", "ignore:Task:UserWarning")


def write_settings(folder: Path, *, start: int) -> Path:
    """Write a log of 50 users that begins at `start`, and settings that train both models on it; return the latter."""
    log = folder / "log.csv"
    with log.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "timestamp"])
        writer.writerows((user, item, start + time) for user, item, time in synthetic_rows(users=50))
    settings = folder / "settings.yaml"
    content = {
        "dataset": "own",
        "leaderboard": list(MODELS),
        "ingest": {"source": "csv", "interactions": str(log)},
        "finetune": {"epochs": 1, "batch_size": 16, "warmup_steps": 1},
        "evaluate": {"bootstrap": 100},
        "register": {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
        "models": {
            "sasrec": {"options": {"d_model": 16, "layers": 1, "heads": 2, "length": 12}},
            "flash4rec": {
                "options": {"d_model": 16, "d_shared": 8, "d_value": 16, "layers": 1, "d_expert": 16, "length": 12},
                "finetune": {"learning_rate": 0.002},
            },
        },
    }
    settings.write_text(yaml.safe_dump(content))
    return settings


def run_on_this_machine(settings: Path, root: Path) -> Path:
    """Run the pipeline with the local runner; return the folder with one folder a task."""
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root), raise_on_error=True)
    params = load_config(settings)
    training_pipeline(params, params.leaderboard)(state=str(root / "state"), baseline=str(root / "no-baseline.json"))
    return next(root.glob("seqrec-training-*"))


def call_the_stages(settings: Path, out: Path) -> Path:
    """Call the stage functions one after the other; return the folder of reports."""
    params, data, sequences, reports = load_config(settings), out / "data", out / "sequences", out / "reports"
    verdict = out / "validation.json"
    ingest(dataset="own", output=data, downloads=out / "downloads", config=params.section("ingest"))
    baseline = out / "no-baseline.json"
    validate(dataset="own", data=data, report=verdict, baseline=baseline, config=params.section("validate"))
    prepare(dataset="own", data=data, validation=verdict, sequences=sequences, config=params.section("prepare"))
    evaluation = params.section("evaluate")
    baselines(sequences=sequences, reports=reports, config=evaluation)
    for model in MODELS:
        initial, checkpoint = out / model / "initial", out / model / "finetuned"
        shared = {"sequences": sequences, "state": out / "state", "filter_seen": evaluation.filter_seen}
        architecture, config = params.model(model), params.section("pretrain", model=model)
        pretrain(model=model, initial=initial, architecture=architecture, config=config, **shared)
        config = params.section("finetune", model=model)
        finetune(model=model, initial=initial, checkpoint=checkpoint, config=config, **shared)
        evaluate(model=model, sequences=sequences, checkpoint=checkpoint, report=reports / model, config=evaluation)
    return reports


@pytest.fixture(scope="module")
def _offline():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "SEQREC_DATA_MIRROR"):
            patch.delenv(name, raising=False)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            patch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
        yield


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, _offline):
    """The tasks of one pipeline run, and the reports of the same stages called as functions."""
    folder = tmp_path_factory.mktemp("pipeline")
    settings = write_settings(folder, start=YEAR_2001)
    return run_on_this_machine(settings, folder / "root"), call_the_stages(settings, folder / "direct")


def without_seconds(metrics):
    return {name: value for name, value in metrics.items() if name not in SECONDS}


@pytest.mark.parametrize("name", RESULTS)
def test_the_pipeline_gives_the_metrics_of_the_stage_functions(outcome, name):
    tasks, reports = outcome

    found, expected = (read_json(folder / name / METRICS) for folder in (tasks / "register/reports", reports))
    assert without_seconds(found) == without_seconds(expected)
    for file in (CASES, RECOMMENDATIONS):
        assert pq.read_table(tasks / "register/reports" / name / file) == pq.read_table(reports / name / file)


def test_the_pipeline_gives_the_leaderboard_of_the_stage_functions(outcome):
    tasks, reports = outcome

    board = read_json(tasks / "register/reports" / leaderboard.LEADERBOARD)
    expected = leaderboard.build(reports=reports, models=MODELS)
    flags = ("candidate", "champion")
    found = [{key: value for key, value in row.items() if key not in flags} for row in board["rows"]]
    expected = [{key: value for key, value in row.items() if key not in flags} for row in expected]
    assert [without_seconds(row) for row in found] == [without_seconds(row) for row in expected]
    assert {row["model"] for row in found} == set(RESULTS)
    assert board["registry"]["promoted"]
    assert board["registry"]["version"] == 1


def test_numbers_survive_the_way_through_kubeflow(outcome):
    tasks, reports = outcome

    assert read_json(tasks / "prepare/sequences" / SPLIT_CARD) == read_json(reports.parent / "sequences" / SPLIT_CARD)
    for task, model in (("finetune", "sasrec"), ("finetune-2", "flash4rec")):
        found = read_json(tasks / task / "checkpoint/config.json")
        expected = read_json(reports.parent / model / "finetuned/config.json")
        assert json.dumps(found["options"]) == json.dumps(expected["options"])  # as text: 2.0 is not 2
        assert json.dumps(found["config"]) == json.dumps(expected["config"])
        assert found["fingerprint"] == expected["fingerprint"]


def test_validation_is_kept_as_verdict_and_page(outcome):
    tasks, _ = outcome

    assert read_json(tasks / "validate/validation/validation.json")["success"]
    assert "<html" in (tasks / "validate/page").read_text(encoding="utf-8").lower()


@pytest.mark.usefixtures("_offline")
def test_a_failed_validation_stops_the_run_before_any_training(tmp_path):
    settings = write_settings(tmp_path, start=0)  # 1970, before validate.min_date

    with pytest.raises(RuntimeError, match="validate"):
        run_on_this_machine(settings, tmp_path / "root")

    tasks = next((tmp_path / "root").glob("seqrec-training-*"))
    assert {folder.name for folder in tasks.iterdir()} == {"ingest", "validate"}
    assert not read_json(tasks / "validate/validation/validation.json")["success"]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """The compiled pipeline of both models."""
    output = tmp_path_factory.mktemp("compiled") / "training.yaml"
    compile_pipeline(MODELS, output, PARAMS)
    return yaml.safe_load(output.read_text(encoding="utf-8"))


def test_the_compiled_pipeline_has_no_field_that_kubeflow_does_not_know(spec):
    assert json_format.ParseDict(spec, PipelineSpec()).pipeline_info.name == "seqrec-training"


def test_register_alone_is_never_cached(spec):
    tasks = spec["root"]["dag"]["tasks"]

    assert {name for name, task in tasks.items() if not task["cachingOptions"].get("enableCache")} == {"register"}


def test_a_step_of_a_model_reads_the_settings_of_that_model_alone(spec):
    read = {}
    for task in spec["root"]["dag"]["tasks"].values():
        values = task["inputs"]["parameters"].values()
        read[task["taskInfo"]["name"]] = {value.get("componentInputParameter") for value in values} - {None}

    for model in MODELS:
        shared = {"state", "filter_seen"}
        assert read[f"pretrain {model}"] == {*shared, f"architecture_{model}", f"pretrain_{model}"}
        assert read[f"finetune {model}"] == {*shared, f"finetune_{model}"}
        assert read[f"evaluate {model}"] == {"filter_seen", "evaluate"}


def test_settings_are_resolved_for_dataset_and_model(tmp_path):
    content = yaml.safe_load(PARAMS.read_text(encoding="utf-8"))
    content["finetune"]["epochs"] = 7
    content["datasets"][content["dataset"]]["finetune"] = {"epochs": 8, "patience": 3}
    content["models"]["sasrec"]["finetune"] = {"epochs": 9}
    content["datasets"][content["dataset"]]["evaluate"] = {"filter_seen": False}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))

    given = parameters(load(tmp_path / "params.yaml"), MODELS)

    assert [given[f"finetune_{model}"]["epochs"] for model in MODELS] == [9, 8]
    assert [given[f"finetune_{model}"]["patience"] for model in MODELS] == [3, 3]
    assert given["architecture_sasrec"]["options"]["length"] == content["datasets"]["ml-100k"]["options"]["length"]
    assert given["filter_seen"] is False
    assert "filter_seen" not in given["evaluate"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["nothing"], "no entry models.nothing"),
        (["sasrec", "sasrec"], "name each model once"),
        ([], "at least one"),
    ],
)
def test_wrong_models_are_refused(models, message):
    with pytest.raises(ConfigError, match=message):
        training_pipeline(load(PARAMS), models)


def test_a_key_that_cannot_name_a_parameter_is_refused(tmp_path):
    content = yaml.safe_load(PARAMS.read_text(encoding="utf-8"))
    content["models"]["sasrec-wide"] = content["models"]["sasrec"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))

    with pytest.raises(ConfigError, match=r"models\.sasrec-wide: on Kubeflow"):
        training_pipeline(load(tmp_path / "params.yaml"), ["sasrec-wide"])


def test_the_command_compiles_the_chosen_models(tmp_path):
    output = tmp_path / "new" / "one.yaml"

    assert main(["compile", "--models", "flash4rec", "--output", str(output), "--params", str(PARAMS)]) == 0

    names = {task["taskInfo"]["name"] for task in yaml.safe_load(output.read_text())["root"]["dag"]["tasks"].values()}
    assert "finetune flash4rec" in names
    assert "finetune sasrec" not in names


def test_the_command_explains_a_wrong_model(tmp_path, capsys):
    output = tmp_path / "none.yaml"

    assert main(["compile", "--models", "nothing", "--output", str(output), "--params", str(PARAMS)]) == 1

    assert "no entry models.nothing" in capsys.readouterr().err
    assert not output.exists()
