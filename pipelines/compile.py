"""From params.yaml to the file that Kubeflow runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfp.compiler import Compiler

from seqrec.cluster.form import filled_in
from seqrec.commands.settings import check
from seqrec.config import load
from seqrec.pipelines.resources import STATE
from seqrec.pipelines.training import build, inputs


@dataclass(frozen=True, kw_only=True)
class Package:
    """A pipeline compiled from the settings in `params`, and the inputs of a run that differ."""

    models: Sequence[str] = ()  # empty: all of `leaderboard`
    params: Path = Path("params.yaml")  # sections and entries that it leaves out keep their defaults
    pipeline: str = "training"
    form: Mapping[str, Any] = field(default_factory=dict)  # checked when the pipeline is compiled
    cache: bool = True  # whether Kubeflow may skip steps that have run before

    def compile(self, output: Path, state: str = STATE) -> None:
        """Write the pipeline to `output` as YAML; `state` is the folder of downloads and resume states that steps see.

        Raises:
            ConfigError: a wrong setting, or an unknown model.
        """
        settings = load(self.params)
        for name in self.models:
            settings.model_entry(name, "--models")
        chosen = tuple(self.models or settings.leaderboard)
        graph = build(self.pipeline, settings, chosen, state, cache=self.cache)
        check(filled_in(settings.as_dict(), inputs(settings, chosen) | dict(self.form)))
        output.parent.mkdir(parents=True, exist_ok=True)
        Compiler().compile(graph, str(output))
