"""A pipeline on this machine, by KFP's local runners: the same YAML, without a cluster."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from docker.errors import DockerException
from kfp import local
from kfp.components import load_component_from_file
from kfp.local import docker_task_handler, subprocess_task_handler

from seqrec import warm
from seqrec.artifacts import write_text
from seqrec.config import load
from seqrec.pipelines.compile import Package

EXECUTOR = "kfp.dsl.executor_main"
DATABASE = "mlflow.db"  # of the default register.tracking_uri
HARDENED = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "tmpfs": {"/tmp": "mode=1777"},
}


def run_local(package: Package, out: Path, *, docker: bool, network: str, data: Path | None) -> None:
    """Run a pipeline here, its steps in processes or in containers; the flags of `run-local` describe the arguments.

    Everything it writes is below `out`: tasks, state, MLflow's database, and `log.txt` with what the steps print.

    Raises:
        ConfigError: a setting, or an input of the form, is wrong.
        RuntimeError: a step failed.
    """
    out = out.resolve()
    file, log = out / f"{package.pipeline}.yaml", out / "log.txt"
    package.compile(file, str(out / "state"))
    runner = _docker_runner(out, network, data) if docker else local.SubprocessRunner(use_venv=False)
    overrides = dict(package.form.get("overrides", {}))
    uri = load(package.params).section("register").tracking_uri
    if "MLFLOW_TRACKING_URI" not in os.environ and uri == f"sqlite:///{DATABASE}":
        overrides.setdefault("register.tracking_uri", f"sqlite:///{out / DATABASE}")
    try:
        with (
            log.open("w", encoding="utf-8") as written,
            contextlib.redirect_stdout(_Steps(written, sys.stdout)),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", module=r"kfp\.local")  # two for every step, on what a cluster has
            run_package(file, out, {**package.form, "overrides": overrides}, runner)
    except RuntimeError as error:
        raise RuntimeError(f"{error} See {log}") from error
    except DockerException as error:
        raise RuntimeError(f"--docker: Docker does not answer: {error}") from error


class _Steps(io.StringIO):
    """Writes all that KFP prints to a file, and its line about the end of a step to the terminal too."""

    def __init__(self, file: TextIO, terminal: TextIO) -> None:
        super().__init__()
        self.file, self.terminal = file, terminal

    def write(self, text: str) -> int:
        if "finished with status" in text:
            self.terminal.write(text)
            self.terminal.flush()
        return self.file.write(text)

    def flush(self) -> None:
        self.file.flush()


def run_package(file: Path, out: Path, arguments: Mapping[str, Any], runner: Any) -> None:
    """Run the compiled pipeline `file` with one of KFP's local runners; each task writes to a folder of its own.

    Raises:
        RuntimeError: a step failed.
    """
    local.init(runner, pipeline_root=str(out))
    with _warm(Path(out)) if isinstance(runner, local.SubprocessRunner) else contextlib.nullcontext():
        load_component_from_file(str(file))(**arguments)


@contextlib.contextmanager
def _warm(out: Path) -> Iterator[None]:
    """Let the steps import what they need only once: what KFP takes for Python asks a warm process."""
    python = out / "python3"
    with warm.process(EXECUTOR, "mlflow", wait=True, _KFP_RUNTIME="true") as variables:
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        write_text(python, f'#!/bin/sh\n{settings} exec {shlex.quote(sys.executable)} -m seqrec.warm "$@"\n')
        python.chmod(0o700)
        theirs, ours = subprocess_task_handler.environment, contextlib.nullcontext(shlex.quote(str(python)))
        subprocess_task_handler.environment = lambda **_: ours
        try:
            yield
        finally:
            subprocess_task_handler.environment = theirs
            python.unlink()


def _docker_runner(out: Path, network: str, data: Path | None) -> local.DockerRunner:
    from docker.types import Mount

    if os.getuid() == 0:  # files below `out` are written by the image's user
        os.umask(0)
        out.chmod(0o777)
        user = {}
    else:
        user = {"user": f"{os.getuid()}:{os.getgid()}"}
    mounts = [Mount(str(data.resolve()), str(data.resolve()), "bind", read_only=True)] if data else []
    names = ("MLFLOW_TRACKING_URI", "SEQREC_DATA_MIRROR", "SEQREC_STORE")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    docker_task_handler.run_docker_container = functools.partial(_run_container, environment)
    return local.DockerRunner(**HARDENED, **user, network_mode=network, mounts=mounts)


def _run_container(
    surroundings: Mapping[str, str],
    client: Any,
    image: str,
    command: list[str],
    volumes: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> int:
    """Run a step and return its exit status.

    In place of KFP's own, which removes the container by itself and takes a container that is gone for a success, so
    that a failing step can look green (kubeflow/pipelines#13332), and which pulls where it could do without.
    """
    container = client.containers.run(
        image,
        command[1:],
        entrypoint=command[:1],  # as on Kubernetes, where a command replaces the image's
        environment={**surroundings, **(environment or {})},
        volumes=volumes,
        detach=True,
        **arguments,
    )
    try:
        for line in container.logs(stream=True):
            print(line.decode(errors="replace"), end="")
        return int(container.wait()["StatusCode"])
    finally:
        container.remove(force=True)
