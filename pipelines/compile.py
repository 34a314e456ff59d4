"""From params.yaml to the file that Kubeflow runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kfp.compiler import Compiler

from seqrec.commands.settings import check
from seqrec.config import load
from seqrec.pipelines.resources import STATE
from seqrec.pipelines.training import build


def compile_pipeline(
    models: Sequence[str],
    output: Path,
    params: Path = Path("params.yaml"),
    pipeline: str = "training",
    state: str = STATE,
) -> None:
    """Write a pipeline of `models`, all of `leaderboard` if empty, to `output` as YAML.

    Sections and entries that `params` leaves out keep their defaults. `state` is the folder of downloads and resume
    states that the steps see.

    Raises:
        ConfigError: a wrong setting, or an unknown model.
    """
    settings = load(params)
    chosen = tuple(models or settings.leaderboard)
    graph = build(pipeline, settings, chosen, state)
    check(replace(settings, leaderboard=chosen))
    output.parent.mkdir(parents=True, exist_ok=True)
    Compiler().compile(graph, str(output))
