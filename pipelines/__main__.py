"""The command line: `python -m seqrec.pipelines compile | run-local | submit | upload | schedule | ...`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqrec.artifacts import explained
from seqrec.config import read_changes
from seqrec.pipelines import client
from seqrec.pipelines.client import Server
from seqrec.pipelines.compile import Package
from seqrec.pipelines.training import PIPELINES
from seqrec.redaction import excepthook, redacted

LONGEST = 1e9  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 success, 1 a failure that the message explains, 2 wrong usage."""
    flags = _parser().parse_args(arguments)
    sys.excepthook = excepthook
    try:
        flags.run(flags)
    except (ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"{flags.command}: {redacted(explained(error))}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seqrec.pipelines", description="Compile, run and schedule the pipelines on Kubeflow."
    )
    commands = parser.add_subparsers(required=True, dest="command")
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument(
        "--host", default=os.environ.get("KFP_HOST", ""), help="URL of the server (default: KFP_HOST, or this cluster)"
    )
    server.add_argument("--namespace", default="", help="your namespace, on a server with several users")
    server.add_argument("--token", default=os.environ.get("KFP_TOKEN", ""), help="bearer token (default: KFP_TOKEN)")
    server.add_argument(
        "--cookies", default=os.environ.get("KFP_COOKIES", ""), help="session cookies (default: KFP_COOKIES)"
    )
    server.add_argument("--ca-file", default="", help="PEM file of certificates to trust")
    server.add_argument("--insecure", action="store_true", help="do not verify the server's certificate")
    root = argparse.ArgumentParser(add_help=False)
    root.add_argument("--root", default="", help="where to store artifacts, such as s3://bucket/path")

    made = commands.add_parser("compile", parents=[_package()], help="write a pipeline as YAML")
    made.set_defaults(run=_compile)
    made.add_argument("--output", type=Path, required=True, help="the .yaml file to write")

    form = argparse.ArgumentParser(add_help=False)
    form.add_argument("--dataset", default="", help="key in `datasets` (default: `dataset` in the --params file)")
    form.add_argument("--epochs", type=int, default=0, help="maximum epochs of fine-tuning; 0: those of params.yaml")
    form.add_argument(
        "--override", action="append", default=[], metavar="PATH=VALUE", help="a setting for this run; may be repeated"
    )

    here = commands.add_parser("run-local", parents=[_package(), form], help="run a pipeline on this machine")
    here.set_defaults(run=_run_local)
    here.add_argument("--out", type=Path, default=Path("build/local"), help="folder of results (default: %(default)s)")
    here.add_argument("--docker", action="store_true", help="run each step in a container of the image SEQREC_IMAGE")
    here.add_argument("--network", default="none", help="network of the containers: none (default), host, ...")
    here.add_argument("--data", type=Path, help="folder with files to ingest, mounted into the containers")

    sent = commands.add_parser("submit", parents=[_package(), form, server, root], help="start a run on a server")
    sent.set_defaults(run=_submit)
    sent.add_argument("--no-cache", action="store_true", help="run every step again")
    sent.add_argument("--wait", action="store_true", help="wait until the run ends; fail if it fails")
    sent.add_argument("--timeout", type=_seconds, default=86_400, help="seconds to wait (default: %(default)s)")
    sent.add_argument("--poll", type=_seconds, default=10, help="seconds between status checks (default: %(default)s)")

    parents = [_package("retraining"), server, root]
    often = commands.add_parser("schedule", parents=parents, help="schedule a pipeline on a server")
    often.set_defaults(run=_schedule)
    often.add_argument("--cron", required=True, help="six fields, starting with seconds: '0 0 3 * * 0'")

    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("--pipeline", choices=PIPELINES, default="retraining", help="default: %(default)s")
    never = commands.add_parser("unschedule", parents=[which, server], help="delete the schedule of a pipeline")
    never.set_defaults(run=_unschedule)
    listed = commands.add_parser("schedules", parents=[server], help="list the schedules of the pipelines")
    listed.set_defaults(run=_schedules)

    put = commands.add_parser("upload", parents=[_package(), server], help="upload a pipeline, or a new version of it")
    put.set_defaults(run=_upload)
    return parser


def _seconds(text: str) -> float:
    """Return a duration; argparse turns the error into wrong usage."""
    seconds = float(text)
    if not 0 < seconds < LONGEST:
        raise argparse.ArgumentTypeError(f"must be above 0 and below {LONGEST:g} seconds, not {text}")
    return seconds


def _package(pipeline: str = "training") -> argparse.ArgumentParser:
    """Return the flags that say what is compiled; one object a command, since argparse shares their defaults."""
    package = argparse.ArgumentParser(add_help=False)
    package.add_argument("--pipeline", choices=PIPELINES, default=pipeline, help="default: %(default)s")
    package.add_argument("--models", nargs="+", default=[], help="keys in `models` (default: all of `leaderboard`)")
    package.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings (default: %(default)s)")
    return package


def _compile(flags: argparse.Namespace) -> None:
    _packaged(flags).compile(flags.output)


def _run_local(flags: argparse.Namespace) -> None:
    from seqrec.pipelines.local import run_local

    package = _packaged(flags, form=_form(flags))
    run_local(package, flags.out, docker=flags.docker, network=flags.network, data=flags.data)


def _form(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the inputs of a run that flags name."""
    given = {"dataset": flags.dataset, "epochs": flags.epochs, "overrides": read_changes(shlex.join(flags.override))}
    return {name: value for name, value in given.items() if value}


def _submit(flags: argparse.Namespace) -> None:
    server, package = _server(flags), _packaged(flags, form=_form(flags), cache=not flags.no_cache)
    run_id = client.submit(server, package, root=flags.root)
    sys.stdout.write(f"run {run_id}\n")
    if flags.wait:
        client.wait(server, run_id, timeout_s=flags.timeout, poll_s=flags.poll)


def _schedule(flags: argparse.Namespace) -> None:
    recurring = client.schedule(_server(flags), _packaged(flags), cron=flags.cron, root=flags.root)
    sys.stdout.write(f"recurring run {recurring}\n")


def _unschedule(flags: argparse.Namespace) -> None:
    sys.stdout.write(f"deleted {client.unschedule(_server(flags), flags.pipeline)}\n")


def _schedules(flags: argparse.Namespace) -> None:
    for pipeline in PIPELINES:
        for one in client.schedules(_server(flags), pipeline):
            cron = one.trigger.cron_schedule.cron
            sys.stdout.write(f"{pipeline}  {cron}  {one.status}  {one.recurring_run_id}\n")


def _upload(flags: argparse.Namespace) -> None:
    pipeline, version = client.upload(_server(flags), _packaged(flags))
    sys.stdout.write(f"pipeline {pipeline} version {version}\n")


def _packaged(flags: argparse.Namespace, **more: Any) -> Package:
    return Package(models=flags.models, params=flags.params, pipeline=flags.pipeline, **more)


def _server(flags: argparse.Namespace) -> Server:
    names = ("host", "namespace", "token", "cookies", "ca_file", "insecure")
    return Server(**{name: getattr(flags, name) for name in names})


if __name__ == "__main__":
    sys.exit(main())
