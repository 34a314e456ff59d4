"""Figures of a pipeline run, drawn with plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from plotly.colors import qualitative
from plotly.graph_objects import Bar, Figure, Heatmap, Scatter
from plotly.subplots import make_subplots

from seqrec.analysis.strec_sparsity import Point
from seqrec.evaluation.leaderboard import SELECTION

METRIC = "test/ndcg@10"
TERMS = ("loss/", "figure/")  # prefixes, in a record of the history, of what a model reports of its own
COLUMNS = 3
PANEL = 300  # pixels, height
COLOURS = qualitative.D3
Record = Mapping[str, Any]


def learning_curves(histories: Mapping[str, Sequence[Record]]) -> Figure:
    """Return loss and validation metric by epoch, a line a model; `histories` are the records of history.jsonl.

    A baseline has none. A model's colour is that of its place among the names: give every figure the same ones.
    """
    return _curves(histories, ("loss", SELECTION), columns=2)


def terms(history: Sequence[Record]) -> Figure | None:
    """Return a panel for each term of a model's loss and each figure it reports, by epoch; None if it is one term."""
    keys = list(dict.fromkeys(key for record in history for key in record if key.startswith(TERMS)))
    return _curves({"": history}, keys, columns=COLUMNS) if len(keys) > 1 else None


def _curves(histories: Mapping[str, Sequence[Record]], keys: Sequence[str], *, columns: int) -> Figure:
    figure = _panels(keys, columns)
    for place, key in enumerate(keys):
        for number, (name, history) in enumerate(histories.items()):
            points = [(epoch, record[key]) for epoch, record in enumerate(history, start=1) if key in record]
            if points:
                epochs, values = zip(*points, strict=True)
                line = Scatter(x=epochs, y=values, mode="lines+markers", **_style(name, number, place))
                _add(figure, place, columns, line)
    for epoch in sorted({epoch for history in histories.values() for epoch in _phase_starts(history)}):
        figure.add_vline(epoch - 0.5, line={"dash": "dot", "color": "grey"})
    figure.update_xaxes(title="epoch")
    return figure


def _phase_starts(history: Sequence[Record]) -> list[int]:
    """Return the epochs (1, 2, ... over all phases) at which another phase begins."""
    pairs = enumerate(pairwise(history), start=2)
    return [epoch for epoch, (before, after) in pairs if before.get("phase") != after.get("phase")]


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
    figure = _panels([f"{METRIC} by {kind}" for kind in by_kind], max(1, len(by_kind)))
    for place, keys in enumerate(by_kind.values()):
        labels = [_slice_label(key, metrics) for key in keys]
        for number, (name, values) in enumerate(metrics.items()):
            bar = Bar(x=labels, y=[values.get(key) for key in keys], **_style(name, number, place))
            _add(figure, place, len(by_kind), bar)
    return figure


def _slice_label(key: str, metrics: Mapping[str, Mapping[str, float]]) -> str:
    counts = (values.get(key.replace(METRIC, "test/cases")) for values in metrics.values())
    count = next((count for count in counts if count is not None), None)
    name = key.partition("=")[2]
    return name if count is None else f"{name}<br>{count:,.0f} cases"


def coverage_against_accuracy(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return test NDCG@10 with its interval against catalogue coverage, a point a row of the leaderboard."""
    figure = _panels([f"{METRIC} with its 95 % interval, against coverage"], 1)
    for number, row in enumerate(rows):
        value = row[METRIC]
        above, below = max(0.0, row[f"{METRIC}/high"] - value), max(0.0, value - row[f"{METRIC}/low"])
        error = {"type": "data", "array": [above], "arrayminus": [below]}
        style = _style(row["model"], number, 0)
        style["marker"] |= {"size": 10, "symbol": "square" if row["baseline"] else "circle"}
        figure.add_trace(Scatter(x=[row["test/coverage@10"]], y=[value], error_y=error, mode="markers", **style))
    figure.update_xaxes(title="test/coverage@10")
    return figure


def masked_attention(before_LL: Sequence[Sequence[float]], after_LL: Sequence[Sequence[float]]) -> Figure:
    """Return two heat maps, a row an event that reads and a column an event that is read, counted back from the last.

    Args:
        before_LL: weights of the attention without masks.
        after_LL: the same with them.
    """
    figure = _panels(("attention of the last layer without masks", "with masks"), 2)
    back = list(range(1 - len(before_LL), 1))
    top = max(max(row) for row in before_LL)
    for place, weights in enumerate((before_LL, after_LL)):
        heat = Heatmap(z=weights, x=back, y=back, zmin=0, zmax=top, colorscale="Blues", showscale=place == 1)
        _add(figure, place, 2, heat)
    figure.update_xaxes(title="event read")
    figure.update_yaxes(title="event that reads", autorange="reversed")
    return figure


def sparsity(points: Sequence[Point]) -> Figure:
    """Return accuracy and time of a model against the share of rows that it does not compute; a star: as trained."""
    figure = _panels((f"{SELECTION}, served with fewer rows", "µs a history"), 2)
    shares = [point.sparsity for point in points]
    marks = {"symbol": ["star" if point.trained else "circle" for point in points], "size": 9, "color": COLOURS[0]}
    for place, values in enumerate(([point.ndcg for point in points], [point.microseconds for point in points])):
        _add(figure, place, 2, Scatter(x=shares, y=values, mode="lines+markers", marker=marks, showlegend=False))
    figure.update_xaxes(title="share of rows not computed, mean of the layers", tickformat=".0%")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _panels(titles: Sequence[str], columns: int) -> Figure:
    rows = max(1, -(-len(titles) // columns))
    figure = make_subplots(rows, columns, subplot_titles=titles)
    figure.update_layout(
        height=PANEL * rows + 100, template="plotly_white", margin={"l": 60, "r": 20, "t": 50, "b": 50}
    )
    return figure


def _style(name: str, number: int, place: int) -> dict[str, Any]:
    """Return what makes a model look the same in every panel, and appear in the legend once."""
    colour = {"color": COLOURS[number % len(COLOURS)]}
    return {"name": name, "legendgroup": name, "showlegend": bool(name) and place == 0, "marker": colour}


def _add(figure: Figure, place: int, columns: int, trace: Any) -> None:
    figure.add_trace(trace, row=place // columns + 1, col=place % columns + 1)
