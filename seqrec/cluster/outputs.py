"""What a Kubeflow step leaves besides files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def log_metrics(metrics: Any, values: Mapping[str, float]) -> None:
    """Show `values` in the output `metrics` of a step, a kfp.dsl.Metrics."""
    for name, value in values.items():
        metrics.log_metric(name, value)
