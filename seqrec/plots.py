"""Figures of a pipeline run, drawn without pyplot's global state."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqrec.artifacts import HISTORY, METRICS, read_json
from seqrec.leaderboard import LEADERBOARD, REQUIRED, SELECTION

METRIC = "test/ndcg@10"
SIZE = (8.0, 4.0)  # inches


def page(reports: Path, artifacts: Path) -> str:
    """Return leaderboard, verdict of the gate and figures as one HTML page that needs no other file.

    Args:
        reports: what register has written to.
        artifacts: holds `<model>/finetuned/`.
    """
    report = read_json(reports / LEADERBOARD)
    rows, outcome = report["rows"], report["registry"]
    names = [row["model"] for row in rows]
    files = {name: artifacts / name / "finetuned" / HISTORY for name in names}
    histories = {
        name: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for name, file in files.items()
        if file.exists()
    }
    figures = (
        learning_curves(histories),
        metric_by_slice({name: read_json(reports / name / METRICS) for name in names}),
        coverage_against_accuracy(rows),
    )
    title = html.escape(f"{report['dataset']}, {report['protocol']}")
    verdict = html.escape(f"{outcome['registered_model']} version {outcome['version']}: {outcome['reason']}")
    pictures = "".join(f'<p><img src="data:image/png;base64,{_png(figure)}"></p>' for figure in figures)
    return f"<!doctype html><title>{title}</title><h1>{title}</h1>{_table(rows)}<p>{verdict}</p>{pictures}"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("model", *REQUIRED))
    body = "".join(
        f"<tr><td>{html.escape(row['model'])}</td>" + "".join(f"<td>{row[key]:.6g}</td>" for key in REQUIRED) + "</tr>"
        for row in rows
    )
    return f"<table border><tr>{head}</tr>{body}</table>"


def _png(figure: Figure) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return base64.b64encode(picture.getvalue()).decode()


def learning_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Return loss and validation metric by epoch, a line a model; `histories` are the records of history.jsonl."""
    figure, axes = _panels(2)
    for axis, key in zip(axes, ("loss", SELECTION), strict=True):
        for name, history in histories.items():
            points = [(epoch, record[key]) for epoch, record in enumerate(history, start=1) if key in record]
            axis.plot(
                *zip(*points, strict=True), label=name, marker="." if len(points) < 30 else ""
            ) if points else None
        axis.set(xlabel="epoch", ylabel=key)
    _legend(axes[-1])
    return figure


def metric_by_slice(metrics: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return test NDCG@10 by item popularity and history length, a bar a model.

    Args:
        metrics: of each model, with keys such as `test/ndcg@10/popularity=head`.
    """
    by_kind: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for values in metrics.values() for key in values):
        kind, equals, _ = key.removeprefix(f"{METRIC}/").partition("=")
        if key.startswith(f"{METRIC}/") and equals:
            by_kind.setdefault(kind, []).append(key)
    figure, axes = _panels(max(1, len(by_kind)))
    width = 0.8 / max(1, len(metrics))
    for axis, (kind, keys) in zip(axes, by_kind.items(), strict=False):
        for row, (name, values) in enumerate(metrics.items()):
            axis.bar(
                [i + row * width for i in range(len(keys))], [values.get(key, 0.0) for key in keys], width, label=name
            )
        middle = width * (len(metrics) - 1) / 2
        axis.set_xticks([i + middle for i in range(len(keys))], [key.partition("=")[2] for key in keys])
        axis.set(xlabel=kind, ylabel=METRIC)
    _legend(axes[-1])
    return figure


def coverage_against_accuracy(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return test NDCG@10 with its interval against catalogue coverage, a point a row of the leaderboard."""
    figure, (axis,) = _panels(1)
    for row in rows:
        value = row[METRIC]
        below, above = max(0.0, value - row[f"{METRIC}/low"]), max(0.0, row[f"{METRIC}/high"] - value)
        marker = "s" if row["baseline"] else "o"
        axis.errorbar(
            row["test/coverage@10"], value, yerr=[[below], [above]], fmt=marker, capsize=3, label=row["model"]
        )
    axis.set(xlabel="test/coverage@10", ylabel=f"{METRIC} (95 % interval)")
    _legend(axis)
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    return figure, list(axes[0])


def _legend(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize="small")
