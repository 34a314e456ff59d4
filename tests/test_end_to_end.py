"""The whole pipeline on a tiny log of the user's own: under DVC, two models at a time, and killed in three places."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml
from support import FILTERED, ROOT, figures, synthetic_rows, write_log

from seqrec.__main__ import main

CODE = ("seqrec", "models", "components", "pipelines", "configs", "my", "dvc.yaml", ".dvcignore", ".gitignore")
MODELS = ("sasrec", "gru4rec")
# with -m, it would itself become a fork of the warm process, and start another one for its stages
REPRO = (sys.executable, "-c", "from seqrec.__main__ import main; raise SystemExit(main(['repro', '--jobs', '2']))")
ROWS = (*FILTERED, *MODELS)


def settings(**changes) -> dict:
    """Return params.yaml with the dataset `tiny`, two small models, and `changes` of the sections."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    options = {"length": 12, "d_model": 16, "layers": 1}
    ingest = {"source": "csv", "interactions": "tiny.csv", "items": "items.csv"}
    params["datasets"] = {"tiny": {"ingest": ingest, "options": options}}
    params["models"] = {"sasrec": {"options": {"heads": 1, "dropout": 0.2}}, "gru4rec": {"options": {"dropout": 0.2}}}
    training = {"epochs": 3, "batch_size": 16, "learning_rate": 0.01, "warmup_steps": 2, "save_steps": 3}
    params |= {"dataset": "tiny", "sources": [], "leaderboard": list(MODELS), "tune": {"spaces": {}}}
    params["finetune"] = training
    params["evaluate"] = {"bootstrap": 100}
    params["register"] |= {"allow_below_baseline": True, "graph": False}  # three epochs teach little
    for section, values in changes.items():
        params[section] = {**params[section], **values}
    return params


def make_project(folder: Path) -> Path:
    """Make a project with git and DVC that has never run."""
    folder.mkdir()
    for name in CODE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    for command in (
        ["git", "init", "--quiet"],
        ["git", "config", "user.name", "somebody"],
        ["git", "config", "user.email", "somebody@example.org"],
        ["dvc", "init", "--quiet"],
    ):
        assert call(folder, *command).returncode == 0
    return write_inputs(folder)


def write_inputs(folder: Path) -> Path:
    """Write what a user brings: a log, titles of the items, and params.yaml."""
    rows = synthetic_rows()
    write_log(folder / "tiny.csv", rows, start=1_000_000_000)
    titles = sorted({f"{item},The {item}\n" for _, item, _ in rows})
    (folder / "items.csv").write_text("".join(["item_id,title\n", *titles]))
    (folder / "params.yaml").write_text(yaml.safe_dump(settings(), sort_keys=False))
    return folder


def settings_of_process(folder: Path, **variables: str) -> dict:
    """Return the arguments with which a command runs in `folder` as `make` does, in a process group of its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "DVC_NO_ANALYTICS": "1", **variables}
    for name in ("MLFLOW_TRACKING_URI", "SEQREC_DATA_MIRROR"):
        environment.pop(name, None)
    return {"cwd": folder, "env": environment, "text": True, "start_new_session": True}


def call(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, check=False, **settings_of_process(folder, **variables))


def repro(project: Path, **variables: str) -> str:
    """Run `make repro` and return what it printed."""
    done = call(project, *REPRO, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def ran(output: str) -> list[str]:
    """Return the stages that `make repro` or DVC began."""
    lines = output.splitlines()
    ours = [line.removesuffix(" ...") for line in lines if line.endswith(" ...")]
    return ours or [line.split("'")[1] for line in lines if line.startswith("Running stage")]


def figures_of_rows(reports: Path) -> dict[str, dict]:
    """Return the figures of every row of the leaderboard."""
    return {name: figures(json.loads((reports / name / "metrics.json").read_text())) for name in ROWS}


def weights(artifacts: Path) -> dict[str, bytes]:
    return {name: (artifacts / name / "finetuned" / "best.safetensors").read_bytes() for name in MODELS}


@pytest.fixture(scope="module")
def killed(tmp_path_factory, warm_steps) -> tuple[Path, list[str]]:
    """A project whose pipeline was killed in ingest, finetune and register, then left alone; what each call printed."""
    folder = tmp_path_factory.mktemp("killed")
    project = make_project(folder / "project")
    # Python imports it at its start: the first time, also the warm process that `make repro` has started is killed
    shutil.copy(Path(__file__).with_name("killer.py"), folder / "sitecustomize.py")
    printed = []
    # step 8 ends the second epoch; the state before it is from within that epoch
    for stage, file, variables in (
        ("ingest", "quarantine.parquet", {"PYTHONPATH": str(folder)}),
        ("finetune", "step-8", warm_steps),
        ("register", "vocabulary.parquet", warm_steps),
    ):
        grouped = ("sh", "-c", 'KILL_GROUP=$$ exec "$@"', "sh", *REPRO)
        done = call(project, *grouped, KILL_STAGE=stage, KILL_FILE=file, **variables)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        printed.append(done.stdout + done.stderr)
    return project, [*printed, repro(project, **warm_steps)]


def test_a_pipeline_killed_three_times_gives_the_figures_of_one_never_interrupted(killed, tmp_path, monkeypatch):
    project, printed = killed
    never = write_inputs(tmp_path)
    monkeypatch.chdir(never)
    assert main(["run", "--config-file", "params.yaml", "--out", "out"]) == 0

    begun = [[stage.partition("@")[0] for stage in ran(output)] for output in printed]
    assert [stages[-1] for stages in begun[::2]] == ["ingest", "register"]
    assert "finetune" in begun[1]
    assert "register" not in begun[1]
    assert begun[3] == ["register"]
    assert re.search(r"resuming \S+ finetune at epoch 2, batch 2", printed[2])
    assert re.search(f"^({'|'.join(MODELS)}): ", printed[2], re.MULTILINE)  # as side by side
    assert figures_of_rows(project / "reports") == figures_of_rows(never / "out" / "reports")
    assert weights(project / "artifacts") == weights(never / "out" / "artifacts")
    assert not list((project / "state").glob("*/step-*"))


def test_unchanged_pipeline_then_one_changed_option_then_back(killed, warm_steps):
    project, _ = killed
    files = [path for top in ("data", "artifacts", "reports") for path in (project / top).rglob("*") if path.is_file()]
    before, lock = {path: path.stat().st_mtime_ns for path in files}, (project / "dvc.lock").read_bytes()
    said = repro(project, **warm_steps)
    assert ran(said) == []
    assert "Nothing has changed" in said
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (project / "dvc.lock").read_bytes() == lock
    assert call(project, "git", "add", ".").returncode == 0
    assert call(project, "git", "commit", "--quiet", "--message", "the tiny log").returncode == 0

    done = call(project, "dvc", "exp", "run", "--set-param", "models.sasrec.options.dropout=0.1", **warm_steps)
    assert ran(done.stdout) == ["settings", "pretrain@sasrec", "finetune@sasrec", "evaluate@sasrec", "register"]
    changed = json.loads(call(project, "dvc", "metrics", "diff", "--json").stdout)
    assert [file for file, values in changed.items() if "test/ndcg@10" in values] == ["reports/summary/sasrec.json"]
    shown = call(project, "dvc", "metrics", "show", COLUMNS="100").stdout.splitlines()
    assert len(shown) == 1 + len(ROWS)
    assert max(map(len, shown)) <= 100
    curves = json.loads(call(project, "dvc", "plots", "diff", "--json", "HEAD").stdout)["data"]
    assert curves.keys() == {"reports/curves.csv", "reports/leaderboard.csv"}
    points = curves["reports/curves.csv"][0]["content"]["data"]["values"]
    assert all(float(point["valid/ndcg@10"]) > 0 for point in points)  # an epoch without validation is no 0
    assert {(point["rev"], point["model"]) for point in points} == {*product(("workspace", "HEAD"), MODELS)}

    assert call(project, "git", "checkout", "--quiet", "params.yaml").returncode == 0
    again = repro(project, **warm_steps)
    assert ran(again) == ["settings", "register"]  # which read and write what DVC does not know
    assert again.count("is cached - skipping run") == 3
