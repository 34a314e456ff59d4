"""`seqrec run` and `seqrec import`: a config from the raw log to the registry in one process, without DVC."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import requests
import yaml
from mlflow import MlflowClient
from support import FILTERED, figures, interrupted, running, synthetic_rows, until, write_log

from seqrec.__main__ import main
from seqrec.config import RegisterConfig, ServeConfig, load
from seqrec.locks import locked
from seqrec.serving import http
from seqrec.serving.events import VARIABLE, Store
from seqrec.serving.recommender import Recommender
from seqrec.tracking import runs

CONFIG = {
    "dataset": "log",
    "datasets": {"log": {"ingest": {"source": "csv", "interactions": "log.csv"}}},
    "finetune": {"epochs": 3, "batch_size": 16, "learning_rate": 0.01, "warmup_steps": 2, "save_steps": 3},
    "evaluate": {"bootstrap": 100},
    "register": {"graph": False},
    "models": {"sasrec": {"options": {"d_model": 16, "heads": 1, "layers": 1, "length": 12}}},
}


def scores(out: Path) -> dict[str, float]:
    return figures(json.loads((out / "reports" / "sasrec" / "metrics.json").read_text()))


def run(*flags: str) -> int:
    return main(["run", "--config-file", "config.yaml", *flags])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with log.csv, config.yaml, and what `run --out out` has made of them."""
    folder = tmp_path_factory.mktemp("workplace")
    write_log(folder / "log.csv", synthetic_rows(), start=1_000_000_000)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run("--out", "out", "--metrics", "figures.json") == 0
    return folder


@pytest.fixture(autouse=True)
def _in_workplace(workplace, monkeypatch, caplog):
    monkeypatch.chdir(workplace)
    caplog.set_level(logging.INFO)


def test_run_goes_from_the_raw_log_to_the_leaderboard():
    figures = json.loads(Path("figures.json").read_text())
    assert figures["sasrec/test/ndcg@10"] == scores(Path("out"))["test/ndcg@10"]
    assert {"popularity/test/ndcg@10", "markov/test/ndcg@10", "ease/test/ndcg@10"} <= figures.keys()
    board = json.loads(Path("out/reports/leaderboard.json").read_text())
    assert {row["model"] for row in board["rows"]} == {"sasrec", *FILTERED}
    assert board["registry"] is None
    assert any("of the events repeat an item of the user" in sentence for sentence in board["warnings"])
    assert not Path("mlflow.db").exists()


def test_run_on_prepared_data_gives_the_same_figures_and_registers_them_untrained_if_asked(capsys, caplog):
    assert run("--out", "second", "--data", "out/data") == 0
    assert "import --run second --data out/data registers" in " ".join(capsys.readouterr().out.split())
    assert not Path("second/data").exists()
    assert scores(Path("second")) == scores(Path("out"))

    Path("second/reports/validation.json").write_text("{}")  # of earlier data
    weights = Path("second/artifacts/sasrec/finetuned/best.safetensors")
    before = weights.stat().st_mtime_ns
    caplog.clear()
    assert run("--out", "second", "--data", "out/data", "--register") == 0
    assert "finetune of sasrec is already complete in second/artifacts/sasrec/finetuned" in caplog.text
    assert "pretrain of sasrec" not in caplog.text, "SASRec has no pre-training that could be complete"
    assert weights.stat().st_mtime_ns == before
    assert json.loads(Path("second/reports/leaderboard.json").read_text())["registry"]["model"] == "seqrules"
    versions = MlflowClient(tracking_uri="sqlite:///mlflow.db").search_model_versions("name='seqrec-log'")
    assert [version.tags["seqrec.model"] for version in versions] == ["seqrules"]

    for name in ("prepare.min_rating", "validate.max_drift", "datasets.log.ingest.max_bad_share"):
        assert run("--out", "second", "--data", "out/data", "--changes", f"{name}=1") == 1
        assert f"{name} has no effect with --data" in caplog.text
    assert main(["import", "--run", "second"]) == 1
    assert "--data: second/data holds no prepared data: name the folder that the run was given" in caplog.text
    other = shutil.copytree("out/data", Path("other"))
    card = json.loads((other / "sequences/split.json").read_text()) | {"split_sha256": "0" * 64}
    (other / "sequences/split.json").write_text(json.dumps(card))
    assert main(["import", "--run", "second", "--data", "other"]) == 1
    assert "was trained on another split than other/sequences holds" in caplog.text
    assert run("--out", "second", "--data", "out/data") == 0
    assert not Path("second/reports/index.html").exists(), "it shows what was registered"


def test_epochs_are_logged_live_into_the_experiment_of_register(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    changes = "register.experiment=ours finetune.epochs=1"

    assert run("--out", "live", "--data", "out/data", "--changes", changes) == 0

    client = MlflowClient(tracking_uri=uri)
    assert client.get_experiment_by_name("seqrec") is None
    (logged,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    card = json.loads(Path("live/artifacts/sasrec/finetuned/config.json").read_text())
    assert logged.data.tags["mlflow.seqrec.fingerprint"] == card["fingerprint"]
    assert "curve/loss" in logged.data.metrics


def test_an_interrupted_run_continues_and_ends_the_same(caplog):
    """Its folder holds the figures of an earlier run, whose settings were others."""
    assert run("--out", "third", "--data", "out/data", "--changes", "finetune.epochs=1") == 0
    with interrupted(6):
        run("--out", "third", "--data", "out/data")
    assert main(["import", "--run", "third"]) == 1
    assert "the run in third was interrupted" in caplog.text
    assert run("--out", "third", "--data", "out/data") == 0
    assert re.search(r"resuming \S+ finetune at epoch 2, batch 2", caplog.text)
    assert scores(Path("third")) == scores(Path("out"))


def test_the_data_of_a_run_keeps_its_validation_however_the_folder_is_named():
    shutil.copytree("out", "fourth")

    assert run("--out", "fourth", "--data", str(Path("fourth/data").resolve())) == 0

    assert Path("fourth/reports/validation.json").is_file()


def test_an_earlier_run_stays_where_the_data_is_not_found(caplog):
    before = Path("out/reports/leaderboard.json").read_bytes()

    assert run("--out", "out", "--data", "nowhere", "--changes", "finetune.epochs=1") == 1

    assert "--data: nowhere holds no prepared data" in caplog.text
    assert Path("out/reports/leaderboard.json").read_bytes() == before
    assert load(Path("out/params.yaml")).section("finetune").epochs == 3


def test_settings_of_the_user_in_the_folder_are_not_replaced(tmp_path, caplog):
    (tmp_path / "params.yaml").write_text(mine := "# a comment\n" + yaml.safe_dump(CONFIG))

    assert run("--out", str(tmp_path), "--data", "out/data") == 1

    assert "holds a params.yaml that is not of a run" in caplog.text
    assert (tmp_path / "params.yaml").read_text() == mine


def test_two_at_once_are_told_apart(caplog, monkeypatch):
    with locked(Path("fifth/.lock"), "held"):
        assert run("--out", "fifth", "--data", "out/data") == 1
    assert "--out fifth: in use by process" in caplog.text
    assert not Path("fifth/params.yaml").exists()

    config = RegisterConfig(tracking_uri="sqlite:///locked.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", config.tracking_uri)
    board = Path("out/reports/leaderboard.json")
    before = board.stat().st_mtime_ns
    with runs.registering(config, "log"):
        assert main(["import", "--run", "out"]) == 1
    assert "registering models of log in sqlite:///" in caplog.text
    assert not Path("locked.db").exists()
    assert board.stat().st_mtime_ns == before


def test_the_loop_closes(tmp_path, monkeypatch, caplog):
    """Serve the champion, take events, ingest them with the log, retrain from the champion, promote: that is served."""
    first, second, url = tmp_path / "first", tmp_path / "second", f"sqlite:///{tmp_path}/events.db"
    monkeypatch.setenv(VARIABLE, url)
    shutil.copytree("out", first)
    settings = yaml.safe_load((first / "params.yaml").read_text())
    own = {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db", "allow_below_baseline": True, "graph": False}
    settings["register"] |= own
    (first / "params.yaml").write_text(yaml.safe_dump(settings))
    settings["ingest"] = {"events": True}
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(settings))
    register = load(first / "params.yaml").section("register")

    def command(*words):
        assert main([*map(str, words)]) == 0

    def promote(version):
        command("registry", "promote", "--version", version, "--params", first / "params.yaml")

    command("events", "import", "--interactions", first / "data" / "interactions.parquet")
    options = ServeConfig(poll_s=0.2)
    with running(http.app(*http._served("log", register, options), options, store=Store(url))) as address:

        def ask(user):
            return requests.post(f"{address}/recommend", json={"user": user, "k": 3}, timeout=30).json()

        assert requests.get(f"{address}/ready", timeout=30).status_code == 503
        assert ask("u1") == {"detail": "no champion yet"}
        command("import", "--run", first)
        promote(1)
        until(lambda: requests.get(f"{address}/ready", timeout=30).ok)

        sent = []
        for user in ("u1", "u2", "u3", "u4", "u5", 'new "user", with all'):
            for item in ("i1", "brand new", *ask(user)["items"]):
                sent.append({"event_id": f"e{len(sent)}", "user": user, "item": item, "at": 1.5e9 + len(sent)})
        hide = {"event_id": "hide", "user": "u1", "item": "i9", "kind": "hide", "at": 1.5e9}
        requests.post(f"{address}/events", json={"events": [*sent, hide]}, timeout=30).raise_for_status()
        assert (ask("u1")["version"], ask("u1")["unknown"]) == ("1", 1)

        command("run", "--config-file", tmp_path / "again.yaml", "--out", second, "--from-champion")
        command("import", "--run", second)
        assert ask("u1")["version"] == "1"  # the gate cannot compare: the champion has seen some of the new cases
        promote(2)
        until(lambda: ask("u1")["version"] == "2")
        answer = ask("u1")

    table = pq.read_table(second / "data" / "interactions.parquet").to_pydict()
    got = list(zip(table["user_id"], table["item_id"], table["timestamp"], strict=True))
    known = [(user, item, time + 1_000_000_000) for user, item, time in synthetic_rows()]
    assert got == [*known, *((event["user"], event["item"], int(event["at"])) for event in sent)]
    assert "warm start: the champion knows 40 of 41 items" in caplog.text
    retrained = Recommender.load(second / "artifacts" / "sasrec" / "finetuned")
    past = Store(url).histories(["u1"])["u1"]
    assert (answer["version"], answer["unknown"]) == ("2", 0)
    expected = retrained.recommend(past.items, 3, times=past.times, user="u1", exclude=past.hidden)
    assert answer["items"] == expected.items
