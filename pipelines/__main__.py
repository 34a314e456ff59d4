"""The command line: `python -m pipelines compile --models sasrec flash4rec --output build/training.yaml`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.compile import compile_pipeline


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(prog="pipelines", description="The pipeline on Kubeflow.")
    command = parser.add_subparsers(required=True).add_parser("compile", help="write the pipeline as YAML")
    command.add_argument("--models", nargs="+", default=[], help="keys of `models` (default: all of `leaderboard`)")
    command.add_argument("--output", type=Path, required=True, help="the .yaml file to write")
    command.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings (default: %(default)s)")
    try:
        compile_pipeline(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        sys.stderr.write(f"compile: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
