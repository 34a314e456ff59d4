"""From params.yaml to the file that Kubeflow runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kfp.compiler import Compiler

from seqrec.cluster.form import filled_in
from seqrec.commands.settings import check
from seqrec.config import load
from seqrec.pipelines.resources import STATE
from seqrec.pipelines.training import build, inputs


def compile_pipeline(
    models: Sequence[str],
    output: Path,
    params: Path,
    pipeline: str,
    state: str = STATE,
    *,
    form: Mapping[str, Any] | None = None,
    cache: bool = True,
) -> None:
    """Write a pipeline of `models`, all of `leaderboard` if empty, to `output` as YAML.

    Sections and entries that `params` leaves out keep their defaults. `state` is the folder of downloads and resume
    states that the steps see. `form` holds the inputs that the run will be given, which are checked here. Without
    `cache`, every step runs again.

    Raises:
        ConfigError: a wrong setting, or an unknown model.
    """
    settings = load(params)
    for name in models:
        settings.model_entry(name, "--models")
    chosen = tuple(models or settings.leaderboard)
    graph = build(pipeline, settings, chosen, state, cache=cache)
    check(filled_in(settings.as_dict(), inputs(settings, chosen) | dict(form or {})))
    output.parent.mkdir(parents=True, exist_ok=True)
    Compiler().compile(graph, str(output))
