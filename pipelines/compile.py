"""From params.yaml to the file that Kubeflow runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kfp.compiler import Compiler

from pipelines.training import training_pipeline
from seqrec.config import load


def compile_pipeline(models: Sequence[str], output: Path, params: Path = Path("params.yaml")) -> None:
    """Write the training pipeline of `models`, all of `leaderboard` if empty, to `output` as YAML.

    Raises:
        ConfigError: a wrong setting, or an unknown model.
    """
    settings = load(params)
    pipeline = training_pipeline(settings, models or settings.leaderboard)
    output.parent.mkdir(parents=True, exist_ok=True)
    Compiler().compile(pipeline, str(output))
