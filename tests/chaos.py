"""Kills `make repro` at random moments until enough is enough, and compares what is left with an uninterrupted run.

`make chaos` runs it; KILLS and SEED are its settings. A round takes a fresh copy of a tiny project and starts
`seqrec repro` again and again: each start gets a random moment at which the process group dies by SIGKILL, until one
start is faster than its moment. Then weights, tables, figures and registry must be those of the uninterrupted run.

Half of the moments are times, the other half are file operations: the Nth time that DVC or a stage opens a file of the
project for writing, renames or removes one. Times hit the imports of large libraries most, where little can go wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient
from test_end_to_end import figures_of_rows, make_project, ran, settings, settings_of_process

from seqrec.artifacts import sha256
from seqrec.tracking.registry import WEIGHTS_TAG

SHARE = 0.25  # of the time and the file operations of a whole run: the most that a start has before it is killed
COMPARED = ("artifacts/*/finetuned/best.safetensors", "data/**/*", "reports/*/*.parquet", "reports/validation.*")
# Python imports this module at its start, in DVC as in the stages; they share the count, one byte an operation.
KILLER = """
import os, signal, sys

PROJECT, COUNT, LAST = os.environ["CHAOS_PROJECT"], os.environ["CHAOS_COUNT"], int(os.environ["CHAOS_LAST"])
CHANGES = ("os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile")
count = os.open(COUNT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def kill(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if not (writes or event in CHANGES) or not isinstance(args[0], (str, bytes)):
        return
    if os.path.abspath(os.fsdecode(args[0])).startswith(PROJECT):
        os.write(count, b".")
        if LAST and os.fstat(count).st_size >= LAST:
            os.write(2, f"killed before {event} {os.fsdecode(args[0])}".encode())
            os.killpg(0, signal.SIGKILL)

sys.addaudithook(kill)
"""


def main() -> int:
    """Run rounds until there were enough kills; return 1 if any round ended in something else than the reference."""
    parser = argparse.ArgumentParser(prog="chaos", description="Kill `make repro` at random moments.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the projects of failed rounds")
    flags = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    draw = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        template = _template(folder)
        wanted, whole = _reference(template, folder)
        kills, rounds, failed, began = 0, 0, [], time.monotonic()
        while kills < flags.kills:
            rounds += 1
            project = Path(shutil.copytree(template, folder / "project", symlinks=True))
            done, problem = _round(project, folder, draw, kills, flags.kills, whole)
            kills += done
            differences = [problem] if problem else _differences(wanted, result(project))
            failed += differences
            print(f"round {rounds}: {done} kills, {'; '.join(differences) or 'identical'}")
            if differences and flags.keep:
                shutil.copytree(project, flags.keep / f"round-{rounds}", symlinks=True)
            shutil.rmtree(project)
    print(
        f"{kills} kills in {rounds} rounds, {time.monotonic() - began:.0f} s, seed {flags.seed}: "
        f"{'every round identical to the uninterrupted run' if not failed else f'{len(failed)} differences'}"
    )
    return int(bool(failed))


def _template(folder: Path) -> Path:
    """Return a project that has never run, and saves a state at each step."""
    project = make_project(folder / "template")
    content = settings(finetune={"save_steps": 1})
    (project / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(KILLER)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(project)], check=False)
    return project


def _reference(template: Path, folder: Path) -> tuple[dict[str, Any], tuple[float, int]]:
    """Return the result of an uninterrupted run; its seconds and the number of its file operations."""
    project = Path(shutil.copytree(template, folder / "reference", symlinks=True))
    began = time.monotonic()
    count = folder / "count"
    process = _start(project, folder, 0)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    seconds, operations = time.monotonic() - began, count.stat().st_size
    print(f"uninterrupted: {seconds:.0f} s, {operations} file operations")
    return result(project), (seconds, operations)


def _start(project: Path, folder: Path, last: int) -> subprocess.Popen[str]:
    """Start `seqrec repro` in a process group of its own; it kills itself before file operation `last`, 0 for never."""
    (folder / "count").unlink(missing_ok=True)
    variables = {"CHAOS_PROJECT": str(project), "CHAOS_COUNT": str(folder / "count"), "CHAOS_LAST": str(last)}
    own = settings_of_process(project, PYTHONPATH=str(folder / "hook"), **variables)
    command = [sys.executable, "-m", "seqrec", "repro"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **own)


def _round(
    project: Path, folder: Path, draw: random.Random, before: int, most: int, whole: tuple[float, int]
) -> tuple[int, str]:
    """Start and kill until a start succeeds; return the number of kills, and what went wrong, if anything."""
    kills = 0
    while True:
        last, seconds = 0, None
        if before + kills < most:
            if draw.random() < 0.5:
                last = draw.randint(1, round(SHARE * whole[1]))
            else:
                seconds = draw.uniform(0, SHARE * whole[0])
        process = _start(project, folder, last)
        try:
            printed = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed = process.communicate()[0]
        _await_group(process.pid)
        if process.returncode == 0:
            return kills, ""
        if process.returncode != -signal.SIGKILL:
            return kills, f"`seqrec repro` failed after {kills} kills:\n{printed}"
        kills += 1
        where = printed.rpartition("killed before ")[2].strip().replace(str(project), ".") if last else ""
        moment = f"before operation {last}, {where}" if last else f"after {seconds:.1f} s"
        print(f"kill {before + kills}: in {(ran(printed) or ['no stage'])[-1]}, {moment}")


def _await_group(group: int) -> None:
    """Wait until no process of the group is left: to DVC, a dead one not yet collected by init still holds locks."""
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)


def result(project: Path) -> dict[str, Any]:
    """Return what must not depend on kills: hashes of files, figures, runs and versions of the registry."""
    files = [path for pattern in COMPARED for path in project.glob(pattern) if path.is_file() and path.name[0] != "."]
    found: dict[str, Any] = {str(path.relative_to(project)): sha256(path) for path in files}
    found |= {f"figures of {name}": values for name, values in figures_of_rows(project / "reports").items()}
    leftovers = [str(path.relative_to(project)) for path in project.rglob("*.partial") if ".dvc" not in path.parts]
    found["left over"] = leftovers + [str(path.relative_to(project)) for path in project.glob("state/*/*")]
    return found | _registered(project)


def _registered(project: Path) -> dict[str, Any]:
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    versions = client.search_model_versions("name='seqrec-tiny'")
    champion = client.get_model_version_by_alias("seqrec-tiny", "champion")
    models = client.search_logged_models(experiments)
    return {
        "runs": sorted((run.info.run_name.partition("-")[0], run.info.status) for run in runs),
        "versions": [str(version.version) for version in versions],
        "champion": champion.tags[WEIGHTS_TAG],
        "logged models": sorted((model.name, str(model.status)) for model in models),
    }


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    keys = [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]
    return [f"{key}: {str(found.get(key))[:300]} instead of {str(wanted.get(key))[:300]}" for key in keys]


if __name__ == "__main__":
    sys.exit(main())
