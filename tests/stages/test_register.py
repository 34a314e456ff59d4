from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy
import torch
import yaml
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from support import FILTERED, contents, exit_of, prepare_rows, save

from seqrec.artifacts import CASES_SCHEMA, read_json, sha256, write_json
from seqrec.commands.refit import refit
from seqrec.config import EvaluateConfig, FinetuneConfig, RegisterConfig
from seqrec.data import sequences as data
from seqrec.evaluation import leaderboard, metrics, ranking, results
from seqrec.evaluation.ranking import model_scorer
from seqrec.serving.recommender import Recommender
from seqrec.stages.baselines import baselines
from seqrec.stages.register import register
from seqrec.tracking import runs, view
from seqrec.tracking.runs import TrackingError
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.held_out import split_of

USERS, ITEMS, EVENTS = 20, 12, 8
MODELS = ["sasrec", "wide"]
EVALUATE = EvaluateConfig(top_k=10, bootstrap=100)
PARAMS = {"dataset": "toy", "finetune": {"epochs": 2, "learning_rate": 1e-3}, "leaderboard": MODELS}
EPOCH_RECORDS = [
    {"phase": "train", "epoch": 1, "step": 5, "loss": 2.5, "seconds": 3.0, "valid/ndcg@10": 0.1},
    {"phase": "train", "epoch": 2, "step": 10, "loss": 2.25, "seconds": 2.0, "valid/ndcg@10": 0.25},
    {"phase": "train", "epoch": 3, "step": 15, "loss": 2.0, "seconds": 2.0, "valid/ndcg@10": 0.2},
]


def write_dataset(root):
    draw = torch.Generator().manual_seed(0)
    items = [torch.randperm(ITEMS, generator=draw)[:EVENTS].tolist() for _ in range(USERS)]
    rows = [(f"u{user}", f"i{item}", time) for user, row in enumerate(items) for time, item in enumerate(row)]
    prepare_rows(root / "data", rows, "toy")
    write_json(root / "data" / "source.json", {"source": "toy", "licence": "CC0"})


def split_sha256():
    return read_json(Path("data/sequences/split.json"))["split_sha256"]


def train_model(root, name, d_model):
    """Write what finetune and evaluate write, for a model that was never trained."""
    prepared = data.load(root / "data/sequences")
    torch.manual_seed(d_model)
    facts = {"stage": "finetune", "seconds": 7.0, "config": asdict(FinetuneConfig()), "split": split_of(prepared.card)}
    history = "".join(json.dumps(record) + "\n" for record in EPOCH_RECORDS)
    facts |= {"model": name, "fingerprint": f"{name}-{d_model}"}
    facts["history_sha256"] = hashlib.sha256(history.encode()).hexdigest()
    options = {"length": 6, "d_model": d_model, "layers": 1}
    folder = save("sasrec", root / "data/sequences", root / "artifacts" / name / "finetuned", options=options, **facts)
    (folder / "history.jsonl").write_text(history)
    report, scorer = {"parameters": 100 * d_model, "train_seconds": 7.0}, model_scorer(load_checkpoint(folder).model)
    with torch.no_grad():
        results.report(scorer, prepared, root / "reports" / name, EVALUATE, report)


def set_validation_ranks(root, name, rank):
    """Overwrite the outcome of an evaluation: every validation target at `rank`."""
    report = root / "reports" / name
    rows = pq.read_table(report / "cases.parquet").to_pylist()
    for row in rows:
        row["rank"] = rank if row["split"] == "valid" else row["rank"]
    pq.write_table(pa.Table.from_pylist(rows, schema=CASES_SCHEMA), report / "cases.parquet")
    value = {"valid/ndcg@10": 1 / math.log2(rank + 1)}
    write_json(report / "metrics.json", read_json(report / "metrics.json") | value)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A finished pipeline beside an empty tracking database: both take seconds to make."""
    root = tmp_path_factory.mktemp("template")
    write_dataset(root)
    folders = {name: root / name for name in ("data", "artifacts", "reports")}
    baselines(sequences=root / "data" / "sequences", **folders, config=EVALUATE)
    for name, d_model, rank in (("sasrec", 4, 3.0), ("wide", 8, 5.0)):
        train_model(root, name, d_model)
        set_validation_ranks(root, name, rank)
    runs.connect(RegisterConfig(tracking_uri=f"sqlite:///{root}/mlflow.db"))
    return root


@pytest.fixture
def project(template, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(template, tmp_path / "project"))
    return tmp_path / "project"


@pytest.fixture(scope="module")
def registered_template(template, tmp_path_factory):
    """A project after `run()`, with a live run, a commit and a lock file: where it was, where it was moved to, and what
    `run()` returned and stored.
    """
    root = shutil.copytree(template, tmp_path_factory.mktemp("registered") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
            subprocess.run(["git", *command], check=True)
        Path("dvc.lock").write_text("schema: '2.0'")
        with runs.live_run("wide-8", "wide", RegisterConfig()) as log:
            for number, record in enumerate(EPOCH_RECORDS[:2], start=1):
                log(record, number)
        values = run(examples=3)
        stored = facts()
    return root, root.rename(root.with_name("moved")), values, stored


@pytest.fixture
def registered(registered_template, tmp_path, monkeypatch):
    """A project after `run()`, in a place of its own, to which its old place is a link."""
    old, moved, *_ = registered_template
    monkeypatch.chdir(shutil.copytree(moved, tmp_path / "project"))
    old.unlink(missing_ok=True)
    old.symlink_to(tmp_path / "project")
    return tmp_path / "project"


def run(models=MODELS, pipeline_run="", **changes):
    folders = {name: Path(name) for name in ("artifacts", "reports", "data")} | {"sequences": Path("data/sequences")}
    config = RegisterConfig(**{"allow_below_baseline": True, "graph": False, **changes})  # nothing is trained
    return register(leaderboard=models, params=PARAMS, config=config, pipeline_run=pipeline_run, **folders)


def outcome():
    return read_json(Path("reports/leaderboard.json"))["registry"]


def client():
    return MlflowClient(runs.tracking_uri(RegisterConfig()))


def all_runs():
    experiment = client().get_experiment_by_name("seqrec")
    return {run.info.run_name: run for run in client().search_runs([experiment.experiment_id])}


def aliases():
    return {key: int(value) for key, value in client().get_registered_model("seqrec-toy").aliases.items()}


def test_one_parent_run_holds_a_run_for_every_row(registered):
    runs = all_runs()
    (parent,) = [run for name, run in runs.items() if name.startswith("toy-")]

    assert sorted(runs) == sorted(["sasrec", "wide", *FILTERED, parent.info.run_name])
    for name, child in runs.items():
        assert child.info.status == "FINISHED"
        assert child.data.tags["mlflow.seqrec.split_sha256"] == split_sha256()
        assert child.data.tags.get("mlflow.parentRunId") == (None if name.startswith("toy-") else parent.info.run_id)
        (used,) = child.inputs.dataset_inputs
        assert (used.dataset.name, used.dataset.digest) == ("toy", split_sha256()[:8])
        assert child.info.start_time >= parent.info.start_time
        assert child.info.end_time <= parent.info.end_time
        kind = "pipeline run" if child is parent else "baseline" if name in FILTERED else "model"
        assert child.data.tags["seqrec.kind"] == kind
        for tag in ("mlflow.user", "mlflow.source.name", "mlflow.note.content"):
            assert child.data.tags[tag]
    assert parent.data.params == {
        "dataset": "toy",
        "protocol": "LOO-full",
        "leaderboard": "seqrules, ease, pctm, markov, popularity, sasrec, wide",
    }
    stored = {file.path for file in client().list_artifacts(parent.info.run_id)}
    assert stored == {"leaderboard.json", "index.html", "params.yaml"}
    written = registered / "mlartifacts" / parent.info.run_id / "artifacts" / "params.yaml"
    assert yaml.safe_load(written.read_text()) == PARAMS


def test_a_run_shows_at_most_20_numbers_its_best_epoch_among_them(registered):
    found = all_runs()
    (parent,) = [run for name, run in found.items() if name.startswith("toy-")]

    for child in found.values():
        assert 8 <= len(child.data.metrics) <= 20
        assert not {"curve/epoch", "curve/step", "curve/seconds"} & child.data.metrics.keys()
    values = found["sasrec"].data.metrics
    assert (values["best/valid/ndcg_at_10"], values["best_epoch"]) == (0.25, 2)
    assert parent.data.metrics["valid/ndcg_at_10"] == values["valid/ndcg_at_10"]
    assert parent.data.metrics["leaderboard/wide"] == found["wide"].data.metrics["test/ndcg_at_10"]
    note = parent.data.tags["mlflow.note.content"]
    assert "| **sasrec** | 0.5000 |" in note
    assert read_json(Path("reports/leaderboard.json"))["verdict"]["sentence"] in note  # with the gain and its interval
    assert "`index.html` among the artifacts of this run, and reports/index.html" in note
    for run in found.values():  # shares have four digits
        assert all(value == float(f"{value:.4g}") for key, value in run.data.metrics.items() if "ndcg" in key)


def test_the_experiment_holds_the_view_that_the_printed_link_names(registered):
    place = client().get_experiment_by_name("seqrec")
    (parent,) = [run for name, run in all_runs().items() if name.startswith("toy-")]
    page = view.link("http://127.0.0.1:5000", place.experiment_id)
    key = page.partition("viewStateShareKey=")[2]
    shared = json.loads(place.tags[f"mlflow.sharedViewState.{key}"])

    assert shared["runsExpanded"] == {parent.info.run_id: True}
    shown = {column.partition("`")[2].rstrip("`") for column in shared["columnOrder"]}
    for found in all_runs().values():
        assert shown <= found.data.metrics.keys()


def test_a_copied_project_is_refused_until_its_runs_are_made_anew_and_leaves_the_original_alone(
    registered, tmp_path, monkeypatch
):
    before = {path: path.read_bytes() for path in registered.rglob("*") if path.is_file()}
    copy = shutil.copytree(registered, tmp_path / "copy")
    monkeypatch.chdir(copy)
    with pytest.raises(TrackingError, match=r"moved or copied.*ln -s.*In a copy, remove mlflow.db and mlartifacts/"):
        run()

    ignore = shutil.ignore_patterns("mlflow.db", "mlartifacts")  # another folder: MLflow keeps an open database in mind
    monkeypatch.chdir(shutil.copytree(copy, tmp_path / "emptied", ignore=ignore))
    run()
    assert len(all_runs()) == 8
    assert aliases() == {"candidate": 1, "champion": 1}
    assert {path: path.read_bytes() for path in before} == before


def test_a_baseline_that_is_best_is_served_and_refitted_with_the_settings_that_validation_chose(registered, capsys):
    set_validation_ranks(registered, "pctm", 1.0)

    run(allow_below_baseline=False, max_loss=1.0)

    assert outcome()["model"] == "pctm"
    assert aliases() == {"candidate": 2, "champion": 2}
    served, ours = (
        Recommender.load(place, RegisterConfig()).recommend(["i1", "i2"])
        for place in ("models:/seqrec-toy@champion", "artifacts/pctm/finetuned")
    )
    assert served == ours
    assert served.source == "pctm"
    leaderboard.show(reports=Path("reports"))
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith("Use pctm")
    assert said[-1] == "python -m seqrec serve --saved artifacts/pctm/finetuned"

    folders = {"artifacts": Path("artifacts"), "sequences": Path("data/sequences"), "state": Path("state")}
    assert refit(dataset="toy", **folders, config=RegisterConfig(graph=False))["version"] == 3
    refitted = Recommender.load("models:/seqrec-toy@champion", RegisterConfig())
    before, after = (read_json(Path("artifacts/pctm", name, "config.json")) for name in ("finetuned", "refitted"))
    assert refitted.counts.sum() == USERS * EVENTS
    assert (before["counts"]["rho"], before["filter_seen"]) == (after["counts"]["rho"], after["filter_seen"])
    assert before["counts"]["pairs"] < after["counts"]["pairs"]


def test_the_page_is_written_and_logged_with_the_verdict_and_some_users(registered):
    (parent,) = [run for name, run in all_runs().items() if name.startswith("toy-")]
    page = Path("reports/index.html").read_text(encoding="utf-8")

    logged = registered / "mlartifacts" / parent.info.run_id / "artifacts/index.html"
    assert logged.read_text(encoding="utf-8") == page
    assert page.count("<h3>User u") == 3
    assert "sasrec: why Title of i" in page
    for name in ("sasrec", "wide"):
        figures = registered / "mlartifacts" / all_runs()[name].info.run_id / "artifacts/figures.html"
        assert f"<h1>{name}</h1>" in figures.read_text(encoding="utf-8")


def test_a_model_run_holds_settings_curves_final_values_and_reports_and_is_the_live_one(registered):
    model = all_runs()["sasrec"]
    curve = client().get_metric_history(model.info.run_id, "curve/valid/ndcg_at_10")

    assert model.data.params["options.d_model"] == "4"
    assert model.data.params["config.learning_rate"] == "0.001"
    assert model.data.tags["seqrec.architecture"] == "sasrec"
    assert [(point.step, point.value) for point in curve] == [(1, 0.1), (2, 0.25), (3, 0.2)]
    assert [point.timestamp - model.info.start_time for point in curve] == [3000, 5000, 7000]
    assert model.data.metrics["valid/ndcg_at_10"] == pytest.approx(0.5)  # rank 3: 1 / log2(4)
    stored = {file.path for file in client().list_artifacts(model.info.run_id, "report")}
    assert stored == {"report/metrics.json", "report/cases.parquet", "report/recommendations.parquet"}
    logged = {model.name: model for model in client().search_logged_models([model.info.experiment_id])}
    used = {(metric.dataset_name, metric.dataset_digest) for metric in logged["sasrec"].metrics}
    assert used == {("toy", split_sha256()[:8])}
    assert json.loads(logged["sasrec"].tags["mlflow.modelVersions"]) == [{"name": "seqrec-toy", "version": 1}]

    live = client().get_metric_history(all_runs()["wide"].info.run_id, "curve/loss")
    assert [(point.step, point.value) for point in live] == [(1, 2.5), (2, 2.25), (3, 2.0)]
    assert len(client().search_runs([model.info.experiment_id])) == 8


def test_best_validation_becomes_candidate_and_first_champion(registered):
    assert aliases() == {"candidate": 1, "champion": 1}
    card = client().get_model_version("seqrec-toy", "1").description
    assert "# sasrec on toy" in card
    assert "toy" in client().get_registered_model("seqrec-toy").description
    assert "licence: CC0" in card
    assert read_json(Path("artifacts/sasrec/finetuned/config.json"))["weights_sha256"] in card
    version = client().get_model_version("seqrec-toy", "1")
    assert version.tags["seqrec.model"] == "sasrec"
    assert version.tags["mlflow.seqrec.fingerprint"] == "sasrec-4"
    assert version.tags["seqrec.reason"] == "there was no champion before"
    assert outcome()["promoted"]
    rows = {row["model"]: row for row in read_json(Path("reports/leaderboard.json"))["rows"]}
    assert [name for name, row in rows.items() if row["champion"]] == ["sasrec"]
    assert [name for name, row in rows.items() if row["candidate"]] == ["sasrec"]


def test_runs_and_version_name_the_code_and_the_lock_file(registered):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()

    for tags in (*(run.data.tags for run in all_runs().values()), client().get_model_version("seqrec-toy", "1").tags):
        assert tags["mlflow.source.git.commit"] == commit
        assert tags["mlflow.seqrec.dvc_lock"] == sha256(Path("dvc.lock"))


def test_registering_again_changes_nothing(registered, registered_template):
    *_, first, stored = registered_template
    ended = [run.info.end_time for run in all_runs().values()]
    reports = contents(registered / "reports")
    assert (first["promoted"], first["candidate/valid/ndcg@10"]) == (1.0, pytest.approx(0.5))

    assert run(examples=3) == first

    assert contents(registered / "reports") == reports
    assert facts() == stored
    assert [run.info.end_time for run in all_runs().values()] == ended


def test_a_new_evaluation_updates_its_run_and_if_better_for_every_user_makes_a_champion(registered):
    set_validation_ranks(registered, "wide", 2.9)
    values = run(max_loss=1.0)

    runs = all_runs()
    assert len(runs) == 9  # another parent, the same seven children
    assert runs["wide"].data.metrics["valid/ndcg_at_10"] == 0.5093
    assert aliases() == {"candidate": 2, "champion": 2}
    assert values["promoted"] == 1.0
    assert values["gain/valid/ndcg@10/low"] == pytest.approx(1 / math.log2(3.9) - 0.5)
    assert "register.min_gain" in outcome()["reason"]
    assert client().get_model_version("seqrec-toy", "2").tags["seqrec.promoted"] == "true"
    rows = {row["model"]: row for row in read_json(Path("reports/leaderboard.json"))["rows"]}
    assert [name for name, row in rows.items() if row["champion"]] == ["wide"]
    assert run(max_loss=1.0) == values


def test_a_champion_of_another_filter_is_measured_again_with_the_candidates_own(registered):
    report = registered / "reports/wide"
    write_json(report / "metrics.json", read_json(report / "metrics.json") | {"filter_seen": 0})
    run(models=["wide"], min_gain=0.9)

    assert aliases() == {"candidate": 2, "champion": 1}
    reason = outcome()["reason"]
    assert "(measured with another filter_seen), measured again on these cases (0 items and 0 users" in reason
    prepared, model = data.load(Path("data/sequences")), load_checkpoint(Path("artifacts/sasrec/finetuned")).model
    chosen = data.cases(prepared, "valid")
    rank = ranking.rank(model_scorer(model), prepared, chosen, filter_seen=False).rank_unfiltered.numpy()
    ours = pq.read_table(report / "cases.parquet", filters=[("split", "==", "valid")])["rank"].to_numpy()
    gain = metrics.ndcg(ours, 10).mean() - metrics.ndcg(rank, 10).mean()
    assert outcome()["gain"]["mean"] == pytest.approx(gain)


def test_a_run_that_an_orchestrator_made_becomes_the_parent_also_of_baselines_alone(project, monkeypatch):
    experiment = client().create_experiment("pipelines", artifact_location=str(project / "elsewhere"))
    given = client().create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    monkeypatch.setattr(runs, "injected_run", functools.cache(runs.injected_run.__wrapped__))
    run(models=())

    assert outcome()["promoted"]
    assert "MLFLOW_RUN_ID" not in os.environ
    children = client().search_runs([experiment], f"tags.`mlflow.parentRunId` = '{given}'")
    assert sorted(run.info.run_name for run in children) == sorted(FILTERED)
    assert client().get_run(given).info.status == "RUNNING"  # whoever made it ends it
    assert client().get_experiment_by_name("seqrec") is None


def test_a_dead_server_leaves_the_leaderboard(project, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(
        TrackingError, match=r"register.tracking_uri: http://127.0.0.1:9 does not answer.*leaderboard.json"
    ):
        run()
    assert outcome() is None
    assert len(read_json(Path("reports/leaderboard.json"))["rows"]) == 7
    assert "sasrec" in Path("reports/leaderboard.csv").read_text()


def test_misplaced_artifacts_are_found_before_anything_is_logged(project):
    (project / "taken").write_text("a file where a folder is needed")
    client().create_experiment("seqrec", artifact_location=str(project / "taken"))

    with pytest.raises(TrackingError, match="artifacts cannot be stored under"):
        run()
    assert len(all_runs()) == 1


def test_a_pipeline_run_is_marked_as_complete_by_the_last_thing_that_register_writes(registered, monkeypatch):
    def marks():
        tags = [run.data.tags for name, run in all_runs().items() if name.startswith("toy-")]
        return {one.get("seqrec.pipeline_run"): one.get("mlflow.seqrec.complete") for one in tags}

    with monkeypatch.context() as patch:
        error = MlflowException("the server went away")
        patch.setattr(MlflowClient, "set_experiment_tag", mock.Mock(side_effect=error))
        with pytest.raises(TrackingError, match="the server went away"):
            run(pipeline_run="one")
    assert marks() == {None: "true", "one": None}
    run(pipeline_run="one")
    assert marks() == {None: "true", "one": "one"}


def run_and_die(commits):
    """Register; die at the commit to the database after so many."""
    left = iter(range(commits))
    die = lambda _: next(left, None) is None and os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "commit", die)
    run()


def test_a_register_killed_again_and_again_ends_like_one_that_was_not(project, registered_template):
    *_, stored = registered_template
    for kills in itertools.count():
        status = exit_of(run_and_die, 3 + 60 * kills)
        assert status in (0, -signal.SIGKILL)
        if status == 0:
            break

    assert kills >= 2
    assert facts() == stored


def own(tags):
    return {key: value for key, value in tags.items() if key.startswith("seqrec.")}


def facts():
    """Return all that store and leaderboard hold, without what differs between any two calls."""
    runs = [
        (
            name,
            run.info.status,
            run.data.metrics,
            run.data.params,
            own(run.data.tags),
            {key: len(client().get_metric_history(run.info.run_id, key)) for key in run.data.metrics},
            len(run.inputs.dataset_inputs),
            sorted(path.name for path in Path("mlartifacts", run.info.run_id).rglob("*")),
        )
        for name, run in sorted(all_runs().items())
    ]
    experiment = client().get_experiment_by_name("seqrec").experiment_id
    models = [
        (model.name, str(model.status), len(model.metrics)) for model in client().search_logged_models([experiment])
    ]
    versions = [
        (version.version, version.aliases, own(version.tags))
        for version in client().search_model_versions("name = 'seqrec-toy'")
    ]
    board = read_json(Path("reports/leaderboard.json"))
    return runs, sorted(models), versions, len(client().search_runs([experiment])), board
