"""The first view in MLflow: the main numbers of a run, the shared view of the run table, and the link to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqrec.evaluation.leaderboard import REQUIRED
from seqrec.evaluation.metrics import SELECTION, TEST
from seqrec.tracking.runs import KIND, metric_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

SHARED_VIEW = "mlflow.sharedViewState."  # the tag that MLflow's own page writes when somebody shares a view
EXPERIMENT = {"mlflow.experimentKind": "custom_model_development"}  # or it opens on pages for language models
NOTE = "mlflow.note.content"
KEY = "seqrec"  # of the view
BEST_EPOCH = "best_epoch"
# Of a model's run, with the best epoch and the curves at most 20 numbers; metrics.json has the others.
SCALARS = (*REQUIRED, "test/ndcg@10/popularity=tail")
COLUMNS = (SELECTION, TEST, "test/recall@10", "test/coverage@10")
COLUMN_PIXELS = 140
SECTION = {"uuid": "models", "name": "What differs", "display": True, "isReordered": False}
CHART = {"metricSectionId": SECTION["uuid"], "runsCountToCompare": 10, "deleted": False, "isGenerated": False}
DIFFERENCES = CHART | {  # the first chart: settings in which the runs differ
    "uuid": "differences",
    "type": "DIFFERENCE",
    "chartName": "Settings that differ",
    "compareGroups": ["Parameters"],
    "showDifferencesOnly": True,
    "showChangeFromBaseline": False,
}
LEADERS = 14  # rows of a leaderboard that the parent run carries


def scalars(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the part of `metrics` that a run shows."""
    return {name: metrics[name] for name in SCALARS if name in metrics}


def best_epoch(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the epoch (1, 2, ... over all phases) with the best validation, and its value; empty without any."""
    measured = [(record[SELECTION], -epoch) for epoch, record in enumerate(history, start=1) if SELECTION in record]
    if not measured:
        return {}
    value, epoch = max(measured)
    return {f"best/{SELECTION}": value, BEST_EPOCH: -epoch}


def leaders(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the parent's metrics: the candidate's under their own names, and `leaderboard/<model>` of each row."""
    candidate = next(row for row in rows if row["candidate"])
    values = {name: candidate[name] for name in COLUMNS}
    return values | {f"leaderboard/{row['model']}": row[TEST] for row in rows[:LEADERS]}


def note(rows: Sequence[Mapping[str, Any]], verdict: str, page: Path) -> str:
    """Return the description of the parent run in Markdown: the verdict, where the report is, and the leaderboard."""
    where = f"The report is `{page.name}` among the artifacts of this run, and {page} where it was run."
    lines = [verdict, "", where, "", f"| model | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for row in rows:
        name = f"**{row['model']}**" if row.get("champion") else row["model"]
        lines.append(f"| {name} | " + " | ".join(f"{row[column]:.4f}" for column in COLUMNS) + " |")
    return "\n".join(lines)


def share(client: MlflowClient, experiment: str, newest: str) -> None:
    """Write the view that `link` names into the experiment: the run `newest` unfolded, best validation first."""
    columns = [f"metrics.`{metric_name(name)}`" for name in COLUMNS]
    bars = [CHART | {"uuid": name, "type": "BAR", "metricKey": metric_name(name)} for name in COLUMNS]
    view = {
        "orderByKey": columns[0],
        "orderByAsc": False,
        "selectedColumns": [f"tags.`{KIND}`", *columns],
        "columnOrder": columns,
        "columnWidths": dict.fromkeys(columns, COLUMN_PIXELS),
        "runsExpanded": {newest: True},
        "isAccordionReordered": True,  # or MLflow sorts the section below those that it makes itself
        "compareRunSections": [SECTION],
        "compareRunCharts": [DIFFERENCES, *bars],
    }
    text = "Each pipeline run holds one run per model. Compare the runs of a dataset by valid/ndcg_at_10."
    for key, value in {**EXPERIMENT, NOTE: text, f"{SHARED_VIEW}{KEY}": json.dumps(view)}.items():
        client.set_experiment_tag(experiment, key, value)


def link(address: str, experiment: str) -> str:
    """Return the page of the experiment at `address` that shows its models side by side."""
    return f"{address}/#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey={KEY}"
