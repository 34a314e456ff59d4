"""Runs the pipeline under DVC: one line per stage, and a table of seconds at the end."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from seqrec import locks, warm
from seqrec.artifacts import CHANGES, write_text, written
from seqrec.commands.settings import check, check_for_dvc, forget_edited_files, without_unfed
from seqrec.config import ConfigError, load, read_changes
from seqrec.config.ranges import Count

logger = logging.getLogger(__name__)
PARAMS = Path("params.yaml")
DVC_FILES = Path(".dvc/tmp")
BEFORE = DVC_FILES / "params.yaml"  # params.yaml as it was before a run with changes
DURING = DVC_FILES / "params.run.yaml"  # as the run has written it
HIDDEN = (
    "> ",
    "Updating lock file",
    "Generating lock file",
    "Use `dvc push`",
    "To track the changes with git",
    "\tgit add",
    "To enable auto staging",
    "\tdvc config",
)
TRAINING = ("pretrain", "finetune", "evaluate")  # stages of each model
AFTER_PREPARE = (*TRAINING, "baselines", "register")
REGISTER_AGAIN = "`python -m seqrec register` registers its models in a new or emptied MLflow store."
REGISTER = ("seqrec.stages.register", "seqrec.tracking.gate")  # whose imports take long, too
RUNNING, SKIPPED = "Running stage '", "' didn't change, skipping"


def repro(*, changes: str = "", jobs: Count = 0) -> None:
    """Run the stages that are out of date.

    Args:
        changes: settings for this run alone, such as "finetune.epochs=3 leaderboard=[sasrec]".
        jobs: number of models trained at the same time, each with its share of the cores; 0 = two, or one where there
            is a GPU or a single core.

    Raises:
        ConfigError: a setting does not exist, or its value is wrong; nothing has run.
        LockedError: another call runs in this project.
        ValueError: a stage failed.
    """
    with locks.locked(DVC_FILES / "repro.lock", "make repro"):
        _repro(changes, jobs)


def _repro(changes: str, jobs: int) -> None:
    remove_left_locks()
    repair_lock_file()
    began = time.monotonic()
    with warm.process(*REGISTER) as variables, changed(read_changes(changes)) as environment:
        config = load(PARAMS)
        if missing := {"sources", "leaderboard"} - yaml.safe_load(PARAMS.read_bytes()).keys():
            raise ConfigError(f"{PARAMS}: {sorted(missing)[0]} is missing, which dvc.yaml reads; write it as a list")
        forget_edited_files(config, Path("settings"))
        dvc = Dvc(Console(), {**os.environ, **environment, **variables})
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        jobs = jobs or (1 if shutil.which("nvidia-smi") else min(2, cores))
        out_of_date = dvc.out_of_date()
        if not out_of_date:
            dvc.console.print(f"Nothing has changed since the last run. {REGISTER_AGAIN}")
            return
        if jobs > 1 and len(config.leaderboard) > 1:
            if any(stage.partition("@")[0] not in AFTER_PREPARE for stage in out_of_date):
                dvc.repro(["prepare", *(f"prepare_source@{source}" for source in config.sources)])
                out_of_date = dvc.out_of_date()
            side_by_side(dvc, out_of_date, config.leaderboard, jobs, cores)
        dvc.repro()
    if dvc.seconds:
        dvc.console.print(summary(dvc.seconds.items(), time.monotonic() - began))


def side_by_side(dvc: Dvc, out_of_date: Set[str], models: Sequence[str], jobs: int, cores: int) -> None:
    """Train those of the `models` of which a stage is out of date, `jobs` at a time, and fit the baselines.

    Raises:
        ValueError: a stage failed; what ran beside it was finished.
    """
    groups = [*([f"{stage}@{model}" for stage in TRAINING] for model in models), ["baselines"]]
    groups = [group for group in groups if not out_of_date.isdisjoint(group)]
    if len(groups) < 2:
        return
    waiting, jobs = iter(groups), min(jobs, len(groups))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // jobs)))

    def run() -> None:
        try:
            for group in waiting:
                dvc.repro(group, alone=False, OMP_NUM_THREADS=threads)
        finally:
            groups.clear()  # after a failure, as after an interrupt, nothing else begins

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for lane in as_completed([pool.submit(run) for _ in range(jobs)]):
                lane.result()
        finally:
            groups.clear()


class Dvc:
    """Runs DVC, shows its output without its housekeeping, and measures each stage."""

    def __init__(self, console: Console, environment: Mapping[str, str]) -> None:
        self.console, self.environment = console, environment
        self.seconds: dict[str, float] = {}  # of each stage that ran

    def out_of_date(self) -> set[str]:
        """Return the stages whose inputs or outputs have changed; those after them are not among them."""
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", "status", "--json", "--no-updates"]
        status = subprocess.run(command, stdout=subprocess.PIPE, env=self.environment, check=False)
        if status.returncode:
            raise ValueError("dvc status failed, see above")
        return set(json.loads(status.stdout))

    def repro(self, targets: Sequence[str] = (), *, alone: bool = True, **environment: str) -> None:
        """Run `targets`, by default all stages, and what they need.

        Args:
            targets: names of stages.
            alone: otherwise other calls run at the same time, and what `targets` need is up to date.
            environment: additional variables.

        Raises:
            ValueError: a stage failed.
        """
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *targets]
        label, errors = "", None
        if not alone:
            command.append("--single-item")
            label, errors = f"{targets[-1].rpartition('@')[2]}: ", subprocess.STDOUT
        variables = {**self.environment, **environment}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables) as process:
            assert process.stdout is not None
            times = dict(stages(process.stdout, self.console, label))
        self.seconds |= times
        if process.returncode:
            raise ValueError(f"{list(times)[-1] if times else 'dvc'} failed, see above")


@contextmanager
def changed(changes: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Put `changes` into params.yaml, where DVC reads the models and datasets of its stages, until the block ends.

    The original lies in `BEFORE` meanwhile; if this process is killed, the next call puts it back first.

    Yields:
        The environment of the run, with the changes for MLflow.
    """
    _restore()
    environment = {"PYTHONUNBUFFERED": "1"}
    original = load(PARAMS)
    read = without_unfed(original.with_overrides(changes))
    check_for_dvc(read)
    if read == original:
        yield environment
        return
    check(read)
    write_text(DURING, read.as_yaml())
    with written(BEFORE) as partial:
        shutil.copy2(PARAMS, partial)
    with written(PARAMS.resolve()) as partial:  # the target of a link
        shutil.copyfile(DURING, partial)
        shutil.copymode(PARAMS, partial)
    try:
        yield environment | {CHANGES: json.dumps(changes)}
    finally:
        _restore()


def _restore() -> None:
    """Put back what a run with changes, perhaps a killed one, has replaced; keep what was edited since."""
    if not BEFORE.is_file():
        return
    if PARAMS.read_bytes() not in (DURING.read_bytes(), BEFORE.read_bytes()):
        edited = PARAMS.with_suffix(".edited.yaml")
        shutil.copyfile(PARAMS, edited)
        logger.warning(
            "%s was edited during the run; its old content is restored, and your edits are in %s", PARAMS, edited
        )
    with written(PARAMS.resolve()) as partial:
        shutil.copy2(BEFORE, partial)
    BEFORE.unlink()


def remove_left_locks() -> None:
    """Remove the list of DVC's locks if a killed DVC left it: DVC would refuse to start.

    DVC itself waits for any process with the number of the killed one, as there may be after a container's restart.
    """
    locks = DVC_FILES / "rwlock"
    if not _is_left(locks):
        return
    from dvc.lock import LockError, make_lock

    try:
        with make_lock(f"{locks}.lock", tmp_dir=str(DVC_FILES)):  # held while a running DVC writes the list
            if _is_left(locks):
                locks.unlink()
                logger.warning("removed %s, which an interrupted run left", locks)
    except LockError:
        return


def repair_lock_file() -> None:
    """Put back the state before the run if a killed DVC left dvc.lock half written; keep a copy of a whole one.

    DVC then runs the stages of that run again, which find what they have done.
    """
    lock, kept = Path("dvc.lock"), DVC_FILES / "dvc.lock"
    if not lock.is_file() or not DVC_FILES.is_dir():
        return
    from dvc.lock import LockError, make_lock

    try:
        with make_lock(str(DVC_FILES / "lock"), tmp_dir=str(DVC_FILES)):  # held while a running DVC writes the file
            if _is_whole(lock):
                write_text(kept, lock.read_text(encoding="utf-8"))
                return
            logger.warning("%s was left half written by an interrupted run: the state before that run is used", lock)
            if kept.is_file():
                write_text(lock, kept.read_text(encoding="utf-8"))
            else:
                lock.unlink()
    except LockError:
        return


def _is_whole(lock: Path) -> bool:
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from voluptuous import Invalid

    try:
        COMPILED_LOCKFILE_SCHEMA(yaml.safe_load(lock.read_bytes()))
    except (Invalid, yaml.YAMLError):
        return False
    return True


def _is_left(locks: Path) -> bool:
    """Return whether the list is half written, or names only processes that are no running DVC."""
    try:
        held = json.loads(locks.read_bytes())
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    holders = [*held.get("write", {}).values(), *chain.from_iterable(held.get("read", {}).values())]
    return bool(holders) and not any(_is_dvc(holder["pid"]) for holder in holders)


def _is_dvc(pid: int) -> bool:
    import psutil

    try:
        return any("dvc" in part for part in psutil.Process(pid).cmdline())  # none for one that has ended
    except psutil.NoSuchProcess:
        return False


def stages(lines: Iterable[str], console: Console, label: str = "") -> Iterator[tuple[str, float]]:
    """Print DVC's `lines` without its housekeeping; yield each stage that ran, and its seconds.

    What a stage prints is shown after the `label`.
    """
    running, began = "", 0.0
    for line in lines:
        ends = line.startswith((RUNNING, "Stage '", "To track the changes"))
        if ends and running:
            seconds = time.monotonic() - began
            console.print(f"{running} done in {seconds:.1f} s", highlight=False, markup=False)
            yield running, seconds
            running = ""
        if line.startswith(RUNNING):
            running, began = line.removeprefix(RUNNING).partition("'")[0], time.monotonic()
            console.print(f"{running} ...", highlight=False, markup=False)
        elif line.strip() and SKIPPED not in line and not line.startswith(HIDDEN):
            console.print(label + line.rstrip("\n"), highlight=False, markup=False, soft_wrap=True)
    if running:
        yield running, time.monotonic() - began


def summary(times: Iterable[tuple[str, float]], total: float) -> Table:
    """Return the seconds of every stage that ran, and of all together."""
    table = Table("stage", box=None, pad_edge=False)
    table.add_column("s", justify="right")
    for name, seconds in times:
        table.add_row(name, f"{seconds:.1f}")
    table.add_section()
    table.add_row("total", f"{total:.1f}", style="bold")
    return table
