"""What a Kubeflow step leaves besides files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def log_metrics(metrics: Any, values: Mapping[str, float]) -> None:
    """Show `values` in the output `metrics` of a step, a kfp.dsl.Metrics."""
    for name, value in values.items():
        metrics.log_metric(name, value)


def write_parameters(values: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Write `values` as output parameters of a step: texts as they are, all else as JSON.

    Args:
        values: by name.
        places: name -> file that KFP reads the parameter from.
    """
    for name, place in places.items():
        text = values[name] if isinstance(values[name], str) else json.dumps(values[name])
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).write_text(text, encoding="utf-8")
