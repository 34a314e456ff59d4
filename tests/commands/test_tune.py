"""`seqrec tune`: real searches on a tiny dataset, interrupted at every kind of moment."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import optuna
import pyarrow as pa
import pytest
from mlflow import MlflowClient
from support import with_values

from seqrec.artifacts import shard_writer
from seqrec.commands import tune as module
from seqrec.commands.tune import tune
from seqrec.config import ConfigError, from_dict, load
from seqrec.data import sequences
from seqrec.data.download import DownloadError
from seqrec.locks import LockedError, locked
from seqrec.stages.finetune import finetune
from seqrec.stages.pretrain import pretrain
from seqrec.tracking import runs
from seqrec.training import resume

PARAMS = {
    "dataset": "synthetic",
    "leaderboard": ["sasrec"],
    "ingest": {"source": "csv"},
    "pretrain": {"seed": 1},
    "finetune": {"epochs": 3, "batch_size": 16, "warmup_steps": 2, "save_steps": 2},
    "tune": {
        "trials": 4,
        "startup_trials": 2,
        "warmup_epochs": 1,
        "seed": 2,  # draws the better rate last
        "spaces": {
            "sasrec": {
                "finetune.learning_rate": {"choices": [1.0e-4, 1.0e-2]},
                "options.dropout": {"low": 0.1, "high": 0.3},
            }
        },
    },
    "datasets": {"synthetic": {"options": {"length": 12}}},
    "models": {"sasrec": {"options": {"d_model": 16, "layers": 1}}},
}


def changed(**values) -> dict:
    """Return PARAMS with dotted keys (`__` for the dot) set."""
    return with_values(PARAMS, {path.replace("__", "."): value for path, value in values.items()})


@pytest.fixture(scope="module", autouse=True)
def _dead_server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        yield


def search(prepared: Path, folder: Path, params: dict = PARAMS, **flags) -> dict:
    paths = {"sequences": prepared, "output": folder / "best.yaml", "study": folder / "study.db"}
    return tune(**{"model": "sasrec", "dataset": "synthetic", "params": params, **paths, **flags})


def rows(folder: Path) -> list[tuple]:
    """What the study holds of every trial but those killed while their values were drawn."""
    study = optuna.load_study(study_name="tune", storage=f"sqlite:///{folder}/study.db")
    kept = [trial for trial in study.trials if trial.state.name != "FAIL"]
    return [(trial.state.name, trial.params, trial.intermediate_values, trial.value) for trial in kept]


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory) -> Path:
    """The folder of a search that nothing interrupted; its server was dead."""
    folder = tmp_path_factory.mktemp("whole")
    search(prepared, folder)
    return folder


def budget(folder: Path) -> dict:
    return json.loads((folder / "best.json").read_text())


def test_the_better_of_two_settings_is_found(whole):
    trials = rows(whole)

    complete = [trial for trial in trials if trial[0] == "COMPLETE"]
    best = max(complete, key=lambda trial: trial[3])
    assert best[1]["finetune.learning_rate"] == 1e-2
    assert {trial[1]["finetune.learning_rate"] for trial in trials} == {1e-4, 1e-2}
    assert all(trial[3] == max(trial[2].values()) for trial in complete)
    assert budget(whole)["valid/ndcg@10"] == best[3]
    assert load(whole / "best.yaml").section("finetune").learning_rate == 1e-2


def test_a_trial_below_the_median_is_pruned_and_counted_and_nothing_else_is_left(whole):
    trials = rows(whole)

    assert [trial[0] for trial in trials] == ["COMPLETE", "COMPLETE", "PRUNED", "COMPLETE"]
    first, second, pruned, last = (trial[2] for trial in trials)
    assert set(pruned) == {1, 2}  # epoch 1 is warm-up
    assert max(pruned.values()) < (max(first[1], first[2]) + max(second[1], second[2])) / 2
    assert all(score > max(first[epoch], second[epoch]) for epoch, score in last.items())
    found = budget(whole)
    assert (found["trials"], found["complete"], found["pruned"], found["failed"]) == (4, 3, 1, 0)
    assert found["epochs"] == 3 + 3 + 2 + 3
    assert found["seconds"] > 0
    assert {path.name for path in whole.iterdir()} == {"study.db", "study.db.lock", "best.yaml", "best.json"}


def test_the_config_written_gives_the_best_metric_again(prepared, whole, tmp_path):
    params = load(whole / "best.yaml")
    shared = {"model": "sasrec", "sequences": prepared, "initial": tmp_path / "i", "state": tmp_path / "s"}
    shared["filter_seen"] = params.filters_seen()
    config = params.section("pretrain", model="sasrec")
    pretrain(**shared, data=prepared.parent, architecture=params.model("sasrec"), config=config)
    config = params.section("finetune", model="sasrec")
    values = finetune(**shared, checkpoint=tmp_path / "c", config=config)

    assert values["valid/ndcg@10"] == budget(whole)["valid/ndcg@10"]


def test_a_dead_tracking_server_costs_two_warnings_and_seed_and_epochs_of_the_trials_can_be_set(
    prepared, whole, tmp_path, caplog
):
    search(prepared, tmp_path, changed(tune__trials=2, tune__epochs=1, tune__seed=7))

    warnings = [message for message in caplog.messages if "the trials are not in MLflow" in message]
    assert len(warnings) == 2  # after the first trial, and at the end
    assert budget(tmp_path)["trials"] == 2
    assert [set(trial[2]) for trial in rows(tmp_path)] == [{1}, {1}]
    assert load(tmp_path / "best.yaml").section("finetune").epochs == 1
    assert rows(tmp_path)[0][1] != rows(whole)[0][1]


def test_what_a_dead_server_missed_is_brought_in_as_nested_runs(prepared, whole, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for _ in range(2):  # the second call changes nothing
        search(prepared, whole)
    assert "finetune train" not in caplog.text

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("seqrec").experiment_id])
    (parent,) = [run for run in found if runs.PARENT not in run.data.tags]
    assert (parent.info.run_name, parent.info.status) == ("tune sasrec", "FINISHED")
    assert parent.data.metrics["trials"] == 4
    children = sorted((run for run in found if run is not parent), key=lambda run: run.info.run_name)
    for run, (state, params, scores, _) in zip(children, rows(whole), strict=True):
        assert run.data.tags[runs.PARENT] == parent.info.run_id
        assert run.data.tags["seqrec.trial"] == state.lower()
        assert run.info.status == {"COMPLETE": "FINISHED", "PRUNED": "KILLED"}[state]
        assert run.data.params["finetune.learning_rate"] == str(params["finetune.learning_rate"])
        assert run.data.metrics["valid/ndcg_at_10"] == round(max(scores.values()), 4)
        points = client.get_metric_history(run.info.run_id, "curve/valid/ndcg_at_10")
        rounded = {epoch: round(score, 4) for epoch, score in scores.items()}
        assert {point.step: point.value for point in points} == rounded


class Killed(BaseException):
    """Nothing in the search may catch it."""


def dying(function, call: int, *, after: bool):
    """Return `function`, which dies before or after its call number `call` (1, 2, ...)."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == call and not after:
            raise Killed
        result = function(*args, **kwargs)
        if len(calls) == call:
            raise Killed
        return result

    return wrapped


MOMENTS = [  # each call of the search dies at one of them, and the next goes on
    ("while the study is made", optuna.Study, "set_user_attr", 1, False),
    ("before the first trial is trained", module, "pretrain", 1, False),
    ("in an epoch", resume.ResumeState, "save", 3, True),
    ("between the report of an epoch and its state", optuna.trial.Trial, "report", 1, True),
    ("between the end of a training and the study", optuna.Study, "tell", 1, False),
    ("between the study and the deletion of files", optuna.Study, "tell", 1, True),
    ("while values are drawn", optuna.trial.Trial, "_suggest", 2, False),
    ("between the decision to prune and the study", optuna.trial.Trial, "should_prune", 5, True),
    ("before the config is written", module, "write_text", 1, False),
]


def test_a_search_interrupted_everywhere_is_the_search_that_was_not(prepared, whole, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for moment, place, name, call, after in MOMENTS:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, dying(getattr(place, name), call, after=after))
            with pytest.raises(Killed):
                search(prepared, tmp_path)
            logging.info("killed %s", moment)
    search(prepared, tmp_path)

    assert rows(tmp_path) == rows(whole)
    timed = ("seconds", "best_trial")  # the trial that was being drawn keeps its number
    known, found = ({key: v for key, v in budget(f).items() if key not in timed} for f in (whole, tmp_path))
    assert found == known
    assert not (tmp_path / "study.db.work").exists()
    epochs = [message for message in caplog.messages if " finetune train epoch " in message]
    assert len(epochs) == known["epochs"] - 1  # that of the pruned trial is not shown, and none is shown twice


def test_more_trials_extend_a_search(prepared, whole, tmp_path):
    shutil.copy(whole / "study.db", tmp_path)

    search(prepared, tmp_path, changed(tune__trials=5))

    assert rows(tmp_path)[:4] == rows(whole)
    assert budget(tmp_path)["trials"] == 5


def test_the_test_part_decides_nothing(prepared, whole, tmp_path):
    """The same data, in which every user's last event is another item: the same search."""
    shutil.copytree(prepared, tmp_path / "other")
    with pa.ipc.open_file(prepared / "sequences.arrow") as file:
        table = file.read_all()
    items = [[*row[:-1], row[-1] % 40 + 1] for row in table["items"].to_pylist()]
    column = pa.array(items, type=table.schema.field("items").type)
    with shard_writer(tmp_path / "other" / "sequences.arrow", table.schema) as write:
        write(table.set_column(1, table.schema.field("items"), column))
    assert not sequences.load(tmp_path / "other").items.equal(sequences.load(prepared).items)

    search(tmp_path / "other", tmp_path, changed(tune__trials=2))

    assert rows(tmp_path) == rows(whole)[:2]


def test_a_failed_download_costs_no_trial(prepared, whole, tmp_path, monkeypatch):
    def refused(**_):
        raise DownloadError("the index does not answer")

    params = changed(tune__trials=1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "pretrain", refused)
        with pytest.raises(DownloadError, match="the index does not answer"):
            search(prepared, tmp_path, params)
    search(prepared, tmp_path, params)

    assert rows(tmp_path) == rows(whole)[:1]


def test_the_budget_does_not_replace_the_settings(prepared, tmp_path):
    with pytest.raises(ConfigError, match=r"--output: .*best.json is where the budget goes"):
        search(prepared, tmp_path, output=tmp_path / "best.json")


def test_a_folder_of_another_dataset_is_refused(prepared, tmp_path):
    with pytest.raises(ConfigError, match=r"--dataset: .* holds synthetic, not other: add --dataset synthetic"):
        search(prepared, tmp_path, changed(datasets={"other": {}, "synthetic": {}}), dataset="other")


@pytest.mark.parametrize(
    ("key", "value", "there"), [("protocol", "temporal", "LOO-full"), ("min_user_events", 9, 5), ("min_rating", 3, 0.0)]
)
def test_data_that_was_prepared_with_other_settings_is_refused(prepared, tmp_path, key, value, there):
    with pytest.raises(ConfigError, match=rf"prepare\.{key}: is {value}.*, but .* was prepared with {there}: prepare"):
        search(prepared, tmp_path, changed(**{f"prepare__{key}": value}))
    assert list(tmp_path.iterdir()) == []


def test_settings_that_do_not_go_together_fail_a_trial_and_the_search_goes_on(prepared, tmp_path, caplog):
    ranges = {"sasrec": {"options.heads": {"choices": [2, 4]}, "options.d_model": {"choices": [16, 18]}}}
    search(prepared, tmp_path, changed(tune__epochs=1, tune__spaces=ranges))

    found = budget(tmp_path)
    assert found["failed"] == len([row for row in rows(tmp_path) if row[3] is None])
    assert (found["complete"], found["pruned"]) == (4 - found["failed"], 0)
    assert 1 <= found["failed"] < 4
    assert "has no result: models.sasrec.options: heads: a width of 18 cannot be divided into 4 heads" in caplog.text
    best = load(tmp_path / "best.yaml").model("sasrec").options
    assert (best["heads"], best["d_model"]) in [(2, 16), (2, 18), (4, 16)]


def test_without_any_result_the_error_says_why(prepared, tmp_path):
    settings = {"finetune__warmup_steps": 0, "finetune__clip_norm": 0.0, "tune__trials": 1}
    ranges = {"sasrec": {"finetune.learning_rate": {"choices": [1e30]}}}

    with pytest.raises(ConfigError, match=r"tune\.spaces\.sasrec: no trial has a result; .* is not finite"):
        search(prepared, tmp_path, changed(**settings, tune__spaces=ranges))
    assert not (tmp_path / "best.yaml").exists()


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ({"low": 16, "high": 64, "step": 16}, optuna.distributions.IntDistribution(16, 64, step=16)),
        ({"low": 1e-4, "high": 1, "log": True}, optuna.distributions.FloatDistribution(1e-4, 1.0, log=True)),
        ({"low": 0.0, "high": 0.5, "step": 0.1}, optuna.distributions.FloatDistribution(0.0, 0.5, step=0.1)),
        ({"choices": ["ce", "bce"]}, optuna.distributions.CategoricalDistribution(["ce", "bce"])),
    ],
)
def test_ranges_become_distributions(span, expected):
    params = from_dict(changed(tune__spaces={"sasrec": {"options.x": span}}))

    assert module._distribution(params.space("sasrec")["options.x"]) == expected


RATE = "finetune.learning_rate"


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        ({"sasrec": {RATE: {"low": 0.1, "high": 0.01}}}, r"sasrec\.finetune\.learning_rate: low must be below high"),
        ({"sasrec": {RATE: {"low": 0.0, "high": 0.1, "log": True}}}, "learning_rate: log needs a positive low"),
        ({"sasrec": {RATE: {"low": 0.1}}}, "learning_rate: needs low and high, or choices"),
        ({"sasrec": {RATE: {"choices": []}}}, "learning_rate: choices must not be empty"),
        ({"sasrec": {RATE: {"choices": [0.1], "low": 0.1}}}, "learning_rate: choices cannot be combined with low"),
        ({"sasrec": {"finetune.rate": {"choices": [1]}}}, r"sasrec\.finetune\.rate: no such setting"),
        ({"sasrec": {"dropout": {"choices": [1]}}}, r"sasrec\.dropout: no such setting; expected pretrain"),
        ({"sasrec": {"finetune.epochs": {"choices": [1]}}}, r"tune\.epochs sets the same value"),
        ({"sasrec": {}}, r"tune\.spaces\.sasrec: names no setting to search"),
        ({"gru": {RATE: {"choices": [1]}}}, r"tune\.spaces\.gru: no entry models\.gru; known are sasrec"),
        ({"sasrec": {RATE: {"low": 1e-6, "high": 1e-2}}}, "learning_rate: 1e-06 contradicts the other settings"),
        ({"sasrec": {"options.dropout": {"choices": [0.1, 2]}}}, r"sasrec\.options\.dropout: 2 contradicts"),
        ({"sasrec": {"options.layers": {"low": 1.0, "high": 3.0}}}, r"options\.layers: 1\.6.* valid integer"),
        ({"sasrec": {"options.layers": {"low": 1, "high": 3, "step": 0.5}}}, r"options\.layers: 1\.5 contradicts"),
        ({"sasrec": {"options.layers": {"low": 1, "high": 3, "step": 5}}}, "step must be .* at most high - low"),
        ({"sasrec": {"options.heads": {"choices": [1, 3]}}}, r"sasrec\.options\.heads: 3 contradicts"),
    ],
)
def test_a_wrong_range_is_named_by_its_key_before_anything_runs(prepared, tmp_path, spaces, message):
    with pytest.raises(ConfigError, match=message):
        search(prepared, tmp_path, changed(tune__spaces=spaces, tune__epochs=2))
    assert list(tmp_path.iterdir()) == []


def test_a_study_of_another_search_is_refused(prepared, whole):
    with pytest.raises(ConfigError, match=r"--study: .*study\.db belongs to another search"):
        search(prepared, whole, changed(finetune__epochs=2))


def test_a_trial_without_memory_or_with_wrong_values_fails_and_the_next_one_follows(prepared, tmp_path, monkeypatch):
    errors, train = iter([RuntimeError("not enough memory"), ValueError("wrong")]), module._train

    def failing(*arguments):
        if error := next(errors, None):
            raise error
        return train(*arguments)

    monkeypatch.setattr(module, "_train", failing)

    found = search(prepared, tmp_path, changed(tune__trials=3))

    assert (found["failed"], found["complete"]) == (2, 1)


def test_a_search_reads_text_and_its_config_leaves_the_sources_their_own_data(prepared, tmp_path, caplog):
    for folder in ("data", "data/sources/other"):
        shutil.copytree(prepared.parent, tmp_path / folder)
    options = {"d_model": 8, "layers": 1, "attribute_values": "auto"}
    params = changed(
        sources=["other"],
        datasets={"synthetic": {"ingest": {"interactions": "own.csv"}, "options": {"length": 12}}, "other": {}},
        ingest={"source": "csv", "interactions": "theirs.csv"},
        models={"sasrec": {"architecture": "flash4rec", "options": options}},
        tune__trials=1,
    )
    caplog.set_level(logging.INFO)

    search(tmp_path / "data/sequences", tmp_path, params)

    assert "attribute_values 32" in caplog.text
    best = load(tmp_path / "best.yaml")
    found = [best.section("ingest", dataset=name).interactions for name in ("synthetic", "other")]
    assert found == ["own.csv", "theirs.csv"]


def test_two_processes_do_not_share_a_study(prepared, tmp_path):
    with (
        locked(tmp_path / "study.db.lock", "a test"),
        pytest.raises(LockedError, match=r"--study .*study\.db: in use by"),
    ):
        search(prepared, tmp_path)


def test_a_search_under_torchrun_is_refused(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        search(prepared, tmp_path)
