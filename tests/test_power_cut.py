"""Files that a power cut, or a copy that ended early, has cut short: a clear error, or the same result as without it.

Each case cuts one file of a small project at several lengths, and then runs a command that reads it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from support import YEAR_2001, interrupted, synthetic_rows, weights, write_log
from support import run as train

from seqrec.__main__ import main
from seqrec.artifacts import sha256
from seqrec.config import RegisterConfig
from seqrec.serving import keys
from seqrec.serving.events import Event, Store
from seqrec.tracking import runs

NEXT = re.compile(r"\b(run|remove|restore|train|evaluate|export)\b")  # what the message says to do
SETTINGS = {
    "dataset": "own",
    "leaderboard": ["sasrec"],
    "prepare": {"require_title": True},
    "finetune": {"epochs": 1, "batch_size": 16, "warmup_steps": 1, "counts": "auto"},
    "evaluate": {"bootstrap": 100},
    "models": {"sasrec": {"options": {"d_model": 16, "layers": 1, "heads": 2, "length": 12}}},
    "tune": {"trials": 1, "epochs": 1, "spaces": {"sasrec": {"finetune.learning_rate": {"low": 1e-3, "high": 1e-2}}}},
}
MODEL = "--model sasrec --sequences out/data/sequences"
INITIAL, FINETUNED = "out/artifacts/sasrec/initial", "out/artifacts/sasrec/finetuned"
COMMANDS = {  # name -> the command line, and the files that it writes and that are the same each time
    "validate": ("--data out/data --report out/reports/validation.json --reference none.json", []),
    "accept-reference": ("--data out/data --reference new.json", ["new.json"]),
    "prepare": (
        "--data out/data --validation out/reports/validation.json --sequences out/data/sequences",
        ["out/data/sequences/split.json", "out/data/sequences/sequences.arrow"],
    ),
    "pretrain": (f"{MODEL} --initial {INITIAL} --state state", [f"{INITIAL}/best.safetensors"]),
    "finetune": (
        f"{MODEL} --initial {INITIAL} --checkpoint {FINETUNED} --state state",
        [f"{FINETUNED}/best.safetensors", f"{FINETUNED}/counts.safetensors"],
    ),
    "baselines": ("--sequences out/data/sequences --reports out/reports", ["out/reports/popularity/cases.parquet"]),
    "evaluate": (
        f"{MODEL} --checkpoint {FINETUNED} --report out/reports/sasrec",
        ["out/reports/sasrec/cases.parquet", "out/reports/sasrec/recommendations.parquet"],
    ),
    "score": (f"--sequences out/data/sequences --saved {FINETUNED} --output scores.parquet", ["scores.parquet"]),
    "recommend": (f"--history i1,i2 --saved {FINETUNED}", []),
    "leaderboard": ("--reports out/reports", []),
    "compare": ("out/reports/sasrec out/reports/popularity", []),
    "import": ("--run out", []),
    "events": ("dump --store sqlite:///events.db --output events.csv", ["events.csv"]),
    "keys": ("show", []),
    "tune": (f"{MODEL} --dataset own --study study.db --output tuned.yaml --state state", ["tuned.yaml"]),
}
READ = {  # file -> commands that read it, each in a way of its own
    "out/data/interactions.parquet": "accept-reference prepare",
    "out/data/items.parquet": "validate prepare",
    "out/data/source.json": "validate",
    "out/reports/validation.json": "prepare",
    "out/data/sequences/sequences.arrow": "finetune baselines prepare",
    "out/data/sequences/vocabulary.parquet": "pretrain score prepare",
    "out/data/sequences/users.parquet": "finetune score",
    "out/data/sequences/split.json": "evaluate prepare",
    f"{INITIAL}/best.safetensors": "pretrain finetune",
    f"{FINETUNED}/best.safetensors": "finetune evaluate",
    f"{FINETUNED}/config.json": "finetune recommend import",
    f"{FINETUNED}/history.jsonl": "finetune import",
    f"{FINETUNED}/counts.safetensors": "recommend",
    f"{FINETUNED}/users.parquet": "finetune",
    "out/reports/sasrec/metrics.json": "compare import",
    "out/reports/sasrec/cases.parquet": "compare",
    "out/reports/sasrec/recommendations.parquet": "import",
    "out/reports/leaderboard.json": "leaderboard",
    "events.db": "events",
    "keys.json": "keys",
    "study.db": "tune",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> tuple[Path, dict[str, list[str]]]:
    """A finished run with everything that is kept beside it, and the hashes of what each command writes."""
    folder = tmp_path_factory.mktemp("project")
    write_log(folder / "log.csv", synthetic_rows(users=40), start=YEAR_2001)
    (folder / "items.csv").write_text("item_id,title\n" + "".join(f"i{n},Title {n}\n" for n in range(40)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ingest = {"source": "csv", "interactions": str(folder / "log.csv"), "items": str(folder / "items.csv")}
        tracking = {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "graph": False}
        Path("params.yaml").write_text(yaml.safe_dump({**SETTINGS, "ingest": ingest, "register": tracking}))
        assert main(["run", "--config-file", "params.yaml", "--out", "out"]) == 0
        store = Store("sqlite:///events.db")
        names = [f"user-{n % 50}" for n in range(1_000)]
        store.add([Event(event_id=str(n), user=user, item=f"i{n}", kind="view", at=n) for n, user in enumerate(names)])
        store.engine.dispose()
        keys.add(Path("keys.json"), "app")
        new = ("accept-reference", "score", "events")
        for command in ("tune", *new):
            assert call(command) == 0
        right = {command: written(command) for command in COMMANDS}
        for name in (name for command in new for name in COMMANDS[command][1]):
            Path(name).unlink()
    return folder, right


def call(command: str) -> int:
    return main([command, *shlex.split(COMMANDS[command][0])])


def written(command: str) -> list[str]:
    return [sha256(Path(name)) for name in COMMANDS[command][1]]


def lengths(path: Path) -> list[int]:
    """Where a file is cut: nothing left, all but the end of its content, or its head alone, if it has one."""
    size = path.stat().st_size
    return [0, size - 2, *([100] if path.suffix in (".arrow", ".safetensors", ".db") else [])]


def cut(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.truncate(length)


@pytest.mark.parametrize(("file", "command"), [(f, c) for f, some in READ.items() for c in some.split()])
def test_a_file_cut_short_is_named_or_made_again(project, tmp_path, monkeypatch, caplog, file, command):
    source, right = project
    for length in lengths(source / file):
        folder = tmp_path / str(length)
        shutil.copytree(source, folder)
        monkeypatch.chdir(folder)
        cut(Path(file), length)
        caplog.clear()

        status = call(command)

        if status == 0:
            assert written(command) == right[command], (length, caplog.text)
            assert right[command], f"{length}: {command} reads {file} and finds nothing wrong"
        else:
            message = caplog.records[-1].getMessage()
            assert Path(file).name in message, message
            assert NEXT.search(message), message


def test_the_registry_is_damaged_with_a_clear_error(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    database = tmp_path / "mlflow.db"
    uri = f"sqlite:///{database}"
    runs.connect(RegisterConfig(tracking_uri=uri)).create_registered_model("seqrec-own")
    Path("params.yaml").write_text(yaml.safe_dump({**SETTINGS, "register": {"tracking_uri": uri}}))
    whole = database.read_bytes()
    for length in (0, 1, len(whole) // 2):
        copy = tmp_path / f"{length}.db"
        copy.write_bytes(whole[:length])
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{copy}")
        caplog.clear()

        assert main(["registry", "show"]) == 1

        assert NEXT.search(caplog.records[-1].getMessage())


@pytest.fixture(scope="module")
def trainings(prepared, tmp_path_factory) -> tuple[Path, Path]:
    """A training killed in its second epoch, while it removed the state before the newest one; one without a kill."""
    killed, whole, kept = (tmp_path_factory.mktemp(name) for name in ("killed", "whole", "kept"))
    train(prepared, whole, save_steps=1)
    with interrupted(6):
        train(prepared, killed, save_steps=1)
    (state,) = (killed / "state").glob("*/step-6")
    shutil.copytree(state, kept / "step-6")
    with interrupted(7):
        train(prepared, killed, save_steps=1)
    shutil.move(kept / "step-6", state)
    return killed, whole


@pytest.mark.parametrize(
    ("damaged", "name", "share"),
    [
        (["step-7"], "state.safetensors", 0.99),
        (["step-7"], "state.json", 0.0),
        (["step-6", "step-7"], "state.json", 0.99),
    ],
)
def test_a_damaged_resume_state_is_dropped_and_the_one_before_is_used(
    prepared, trainings, tmp_path, caplog, damaged, name, share
):
    killed, whole = trainings
    caplog.set_level("INFO")
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    for step in damaged:
        (state,) = (tmp_path / "state").glob(f"*/{step}/{name}")
        cut(state, int(share * state.stat().st_size))

    train(prepared, tmp_path, save_steps=1)

    assert caplog.text.count("a resume state cannot be used") == len(damaged)
    assert ("resuming sasrec finetune" in caplog.text) == (len(damaged) == 1)
    ours, theirs = weights(tmp_path), weights(whole)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert not any((tmp_path / "state").iterdir())


@pytest.mark.parametrize("length", [0, 40])
def test_the_plan_of_auto_and_the_mark_of_a_benchmark(tmp_path, caplog, length):
    from seqrec.commands.auto_plan import Plan
    from seqrec.commands.benchmark import _is

    plan = Plan(tmp_path / "auto.json", {"data": "log.csv"})
    plan.save()
    cut(plan.path, length)
    with pytest.raises(ValueError, match=r"auto\.json is damaged .* remove it and repeat"):
        Plan.load(plan.path, plan.request)

    mark = tmp_path / "benchmark.json"
    mark.write_text(json.dumps({"split": "a" * 60}))
    assert _is(mark, {"split": "a" * 60})
    cut(mark, length)
    assert not _is(mark, {"split": "a" * 60})
    assert "the model is evaluated again" in caplog.text
