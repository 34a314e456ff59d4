"""Runs a stage where its settings want it: in this process, in several of this pod, or as a job of the cluster.

`python -m seqrec.cluster.launch FILE` is what each process of the latter two runs: the same stage function, its
arguments read from FILE. A job finds its inputs on the volume of the resume states, and leaves its output there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqrec import redaction
from seqrec.artifacts import read_json, replaced, sha256, write_json, write_text, written
from seqrec.cluster.jobs import Place, finish, forget, spark_application, train_job
from seqrec.config import LaunchConfig, parse
from seqrec.errors import RetryableError
from seqrec.pipeline import BY_NAME

HANDED = {  # stage -> inputs and outputs of its job
    "prepare": (("data", "validation"), "sequences"),
    "pretrain": (("data", "sequences", "champion"), "initial"),
    "finetune": (("sequences", "initial"), "checkpoint"),
}
OF_MODEL = {  # stage of one model -> inputs that an earlier one may have failed to write, and its output
    "pretrain": ((), "initial"),
    "finetune": (("initial",), "checkpoint"),
    "evaluate": (("checkpoint",), "report"),
}
FAILED = "failed.json"
PLACE = "SEQREC_PLACE"  # variable of a step that starts processes or a job: its `Place` as JSON
logger = logging.getLogger(__name__)
ORDER, VALUES, OUTPUT = "order.json", "values.json", "output"


def run(stage: str, *, state: str | Path = "", **arguments: Any) -> dict[str, float]:
    """Run `stage` with `arguments` where the variable `PLACE` says, or in this process; return its figures.

    Args:
        stage: the name of a stage; only prepare, pretrain and finetune run in several processes or as a job.
        state: folder of resume states; for a job, on a volume that its pods also mount.
        arguments: arguments of the stage function; paths may be strings, and sections may be mappings.

    Raises:
        ConfigError: a setting is wrong, or the cluster refuses the job.
        ValueError: a process or the job failed.
    """
    where, function = _place(stage), BY_NAME[stage].function
    hints, keys = typing.get_type_hints(function), {"config": stage, "architecture": f"models.{arguments.get('model')}"}
    if state and "state" in hints:
        arguments["state"] = state
    arguments = {name: _typed(hints[name], value, keys.get(name, name)) for name, value in arguments.items()}
    if where.launch.launcher == "job":
        return _run_job(stage, where, Path(state), arguments)
    if where.launch.processes > 1:
        return _run_processes(stage, where.launch.processes, arguments)
    return function(**arguments)


def run_model(stage: str, **arguments: Any) -> dict[str, float]:
    """Run a stage of one model as `run` does, but let its failure cost this model alone.

    What settings or data make fail in this process is not raised: the reason lies in the output as `FAILED`, and the
    further steps of the model hand it on. Failures of jobs, of several processes, of servers and of files are raised,
    to be retried.
    """
    inputs, output = OF_MODEL[stage]
    for file in (Path(arguments[name], FAILED) for name in inputs):
        if file.is_file():
            write_json(Path(arguments[output], FAILED), read_json(file))
            return {}
    try:
        return run(stage, **arguments)
    except RetryableError:
        raise
    except (ValueError, FloatingPointError) as error:
        if _place(stage).launch != LaunchConfig():
            raise
        reason = f"{stage}: {redaction.redacted(str(error))}"
        logger.error("%s is left out of the leaderboard: %s", arguments["model"], reason)
        shutil.rmtree(arguments[output], ignore_errors=True)
        write_json(Path(arguments[output], FAILED), {"reason": reason})
        return {}


def _place(stage: str) -> Place:
    return parse(Place, json.loads(os.environ.get(PLACE, "{}")), f"kubernetes.launch.{stage}")


def succeeded(models: Sequence[str], reports: Path) -> list[str]:
    """Return those of `models` whose steps did not fail.

    Raises:
        ValueError: all failed; the message has the reasons.
    """
    files = {model: reports / model / FAILED for model in models}
    failed = {model: read_json(file)["reason"] for model, file in files.items() if file.is_file()}
    reasons = "; ".join(f"{model}: {reason}" for model, reason in failed.items())
    if len(failed) == len(files):
        raise ValueError(f"every model failed: {reasons}")
    if failed:
        logger.warning("these models failed and are left out of the leaderboard: %s", reasons)
    return [model for model in models if model not in failed]


def require_success(model: str, output: str | Path) -> None:
    """Raise ValueError with the reason if a step of `model` failed, the last of which wrote `output`."""
    if (file := Path(output, FAILED)).is_file():
        raise ValueError(f"{model}: {read_json(file)['reason']}")


def named(figures: Mapping[str, float]) -> dict[str, float]:
    """Return figures under names that MLflow takes, whose plugin in Kubeflow Pipelines logs the metrics of steps."""
    return {re.sub(r"[^\w/ .:-]", "_", name.replace("@", "_at_")): value for name, value in figures.items()}


def _typed(hint: Any, value: Any, key: str) -> Any:
    """Return `value` as the type that a stage function asks for."""
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return parse(hint, value, key)  # type: ignore[arg-type]
    return Path(value) if Path in (hint, *typing.get_args(hint)) and value is not None else value


def _run_processes(stage: str, processes: int, arguments: Mapping[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        order = _write_order(Path(name), stage, arguments)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        done = subprocess.run([*torchrun, "-m", "seqrec.cluster.launch", str(order)], check=False)
        if done.returncode:
            raise ValueError(f"{stage}: one of {processes} processes failed, see its message above")
        return read_json(order.with_name(VALUES))


def _write_order(folder: Path, stage: str, arguments: Mapping[str, Any]) -> Path:
    write_text(folder / ORDER, json.dumps({"stage": stage, "arguments": arguments}, default=_plain))
    return folder / ORDER


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)  # type: ignore[arg-type]


def execute(order: Path) -> None:
    """Run the stage that the file `order` describes; rank 0 writes its figures beside the file."""
    content = read_json(order)
    os.environ.pop(PLACE, None)  # or `run` would start processes or a job again
    values = run(content["stage"], **content["arguments"])
    if os.environ.get("RANK", "0") == "0":
        write_json(order.with_name(VALUES), values)


def _run_job(stage: str, place: Place, state: Path, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Copy the inputs to the volume, await the job, fetch its output, and delete both.

    A repeated call goes on where an earlier one was cut off.
    """
    inputs, output = _handed(stage, arguments)
    name = job_name(stage, arguments, place.launch.image or place.image)
    folder = state / "jobs" / name
    values = folder / VALUES  # written last
    handed = {key: _hand_over(arguments[key], folder / "inputs" / key) for key in inputs}
    order = _write_order(folder, stage, {**arguments, **handed, output: folder / OUTPUT})
    if stage == "prepare":
        manifest = spark_application(name, place, state, order)
    else:
        manifest = train_job(name, place, state, order)
    if not values.is_file():
        finish(manifest, place.launch.poll_s, values.is_file)
    with replaced(arguments[output]) as fetched:
        shutil.copytree(folder / OUTPUT, fetched, dirs_exist_ok=True)
    figures: dict[str, float] = read_json(values)
    forget(manifest)
    gone = folder.with_name(f"{folder.name}.gone")  # renamed first: half of a folder must not be taken for the whole
    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(folder.rename(gone))
    return figures


def job_name(stage: str, arguments: Mapping[str, Any], image: str) -> str:
    """Return a name that is the same for every attempt at this work in this image, and different for any other."""
    inputs, output = _handed(stage, arguments)
    settings = {key: value for key, value in arguments.items() if key not in (*inputs, output, "state", "sources")}
    content = hashlib.sha256(json.dumps([image, settings], default=_plain, sort_keys=True).encode())
    for key in inputs:
        for path in _files(arguments[key]):
            content.update(f"{path.name} {sha256(path)}".encode())
    subject = str(arguments.get("model") or arguments.get("dataset")).lower()
    # 23 characters: JobSet appends -node-0-NNNN-abcde, and refuses a job whose pods' names exceed 63
    return f"{stage}-{re.sub('[^a-z0-9]', '-', subject)[:23]}-{content.hexdigest()[:12]}"


def _handed(stage: str, arguments: Mapping[str, Any]) -> tuple[list[str], str]:
    inputs, output = HANDED[stage]
    return [key for key in inputs if arguments.get(key) is not None], output


def _files(path: Path) -> list[Path]:
    """Return the files at `path`, except the published ones, which only ingest reads."""
    inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in inside if file.is_file() and "raw" not in file.relative_to(path).parts]


def _hand_over(source: Path, target: Path) -> Path:
    """Copy `source` to `target` in one step, unless an earlier attempt has done so."""
    if target.exists():
        return target
    if source.is_dir():
        with replaced(target) as partial:
            shutil.copytree(source, partial, ignore=shutil.ignore_patterns("raw"), dirs_exist_ok=True)
    else:
        with written(target) as partial:
            shutil.copyfile(source, partial)
    return target


if __name__ == "__main__":
    first = os.environ.get("RANK", "0") == "0"
    handler = logging.StreamHandler()
    handler.setFormatter(redaction.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if first else logging.WARNING, handlers=[handler])
    sys.excepthook = redaction.excepthook
    execute(Path(sys.argv[1]))
