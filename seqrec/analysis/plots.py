"""Figures of a pipeline run, drawn with plotly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plotly.graph_objects import Bar, Figure, Heatmap, Scatter
from plotly.subplots import make_subplots

from seqrec.analysis.strec_sparsity import Point
from seqrec.evaluation.metrics import SELECTION, TEST
from seqrec.pipeline import BASELINES

TERMS = ("loss/", "figure/")  # prefixes of a model's own figures in a record of the history
SLICES = {"popularity": "popularity of the item", "length": "length of the history", "repeat": "repeat of a past item"}
COLUMNS = 3
PANEL = 300  # pixels, height
SAME = 1e-4  # two values of a metric that round to the same figure differ by less
# Okabe and Ito's colours for colour-blind readers, without yellow, which vanishes on white, and black, on dark
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
SYMBOLS = ("square", "diamond", "cross", "triangle-up", "x", "star")  # of the baselines, whose greys are alike
GREYS = ("#767676", "#949494", "#5F5F5F", "#ABABAB", "#868686", "#A0A0A0")  # of the baselines
WHISKERS = "#808080"  # of bars: plotly's own cannot be seen on a dark page
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
WORDS = {  # axis titles
    SELECTION: "NDCG@10 on validation",
    TEST: "NDCG@10 on test",
    "loss": "training loss",
    "test/coverage@10": "coverage: share of the catalogue",
}
Record = Mapping[str, Any]


def learning_curves(histories: Mapping[str, Sequence[Record]], finals: Mapping[str, float]) -> Figure:
    """Return loss and validation metric by epoch, one line per model.

    Args:
        histories: records of history.jsonl for each model; empty for a baseline. The order of the names decides
            colour and dash: use the same order for every figure.
        finals: validation metric of each model in the leaderboard. If it differs from the best of the curve, a star
            marks it at the best epoch: the curve is drawn without the count term, which is fitted after training.
    """
    figure, looks = _curves(histories, ("loss", SELECTION), columns=2), _looks(histories)
    for name, history in histories.items():
        measured = [(record[SELECTION], epoch) for epoch, record in enumerate(history, start=1) if SELECTION in record]
        final = finals.get(name)
        if measured and final is not None and abs(final - max(measured)[0]) > SAME:
            style = _style(name, looks[name], 1)
            style["marker"] |= {"symbol": "star", "size": 13}
            words = f"{name}, with the count term: {final:.4f}<extra></extra>"
            point = {"x": [max(measured)[1]], "y": [final], "mode": "markers", "hovertemplate": words}
            _add(figure, 1, 2, Scatter(**point, **style))
    return figure


def terms(history: Sequence[Record]) -> Figure | None:
    """Return a panel for each term of a model's loss and each figure that it reports; None if there is one term."""
    keys = list(dict.fromkeys(key for record in history for key in record if key.startswith(TERMS)))
    return _curves({"": history}, keys, columns=COLUMNS) if len(keys) > 1 else None


def _curves(histories: Mapping[str, Sequence[Record]], keys: Sequence[str], *, columns: int) -> Figure:
    figure, looks = _panels([WORDS.get(key, key) for key in keys], columns), _looks(histories)
    for panel, key in enumerate(keys):
        for name, history in histories.items():
            points = [(epoch, record[key]) for epoch, record in enumerate(history, start=1) if key in record]
            if points:
                epochs, values = zip(*points, strict=True)
                look = looks[name]
                line = {"color": look["color"], "dash": look["dash"]}
                style = {**_style(name, look, panel), "line": line}
                _add(figure, panel, columns, Scatter(x=epochs, y=values, mode="lines+markers", **style))
    for epoch in sorted({epoch for history in histories.values() for epoch in _phase_starts(history)}):
        figure.add_vline(epoch - 0.5, line={"dash": "dot", "color": "grey"})
    figure.update_xaxes(title="epoch")
    _name_axes(figure, [WORDS.get(key, key) for key in keys])
    return figure


def _phase_starts(history: Sequence[Record]) -> list[int]:
    """Return the epochs (1, 2, ... over all phases) at which another phase begins."""
    pairs = enumerate(itertools.pairwise(history), start=2)
    return [epoch for epoch, (before, after) in pairs if before.get("phase") != after.get("phase")]


def metric_by_slice(metrics: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return test NDCG@10 by item popularity and history length, one bar per model.

    Args:
        metrics: metrics of each model, with keys such as `test/ndcg@10/popularity=head`.
    """
    by_kind: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for values in metrics.values() for key in values):
        kind, equals, end = key.removeprefix(f"{TEST}/").partition("=")
        if key.startswith(f"{TEST}/") and equals and "/" not in end:
            by_kind.setdefault(kind, []).append(key)
    words = [f"{WORDS[TEST]} by {SLICES.get(kind, kind)}" for kind in by_kind]
    figure, looks = _panels(words, max(1, len(by_kind))), _looks(metrics)
    for panel, keys in enumerate(by_kind.values()):
        labels = [_slice_label(key, metrics) for key in keys]
        for name, values in metrics.items():
            heights = [values.get(key) for key in keys]
            style = _style(name, looks[name], panel)
            _add(figure, panel, len(by_kind), Bar(x=labels, y=heights, error_y=_error(keys, values), **style))
    _name_axes(figure, [WORDS[TEST]] * len(by_kind))
    return figure


def _error(keys: Sequence[str], values: Mapping[str, float]) -> dict[str, Any]:
    """Return the whiskers of bars, from the value to `/low` and `/high`; none where there is no interval."""
    ends = [(values.get(f"{key}/low"), values.get(key), values.get(f"{key}/high")) for key in keys]
    below = [max(0.0, value - low) if low is not None and value is not None else 0.0 for low, value, _ in ends]
    above = [max(0.0, high - value) if high is not None and value is not None else 0.0 for _, value, high in ends]
    look = {"visible": any(below) or any(above), "thickness": 1, "color": WHISKERS}
    return {"type": "data", "array": above, "arrayminus": below, **look}


def _slice_label(key: str, metrics: Mapping[str, Mapping[str, float]]) -> str:
    counts = (values.get(key.replace(TEST, "test/cases")) for values in metrics.values())
    count = next((count for count in counts if count is not None), None)
    name = key.partition("=")[2]
    return name if count is None else f"{name}<br>{count:,.0f} cases"


def coverage_against_accuracy(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return test NDCG@10 with its interval against catalogue coverage, one point per row of the leaderboard."""
    figure = _panels([f"{WORDS[TEST]} [95 %] against coverage"], 1)
    looks = _looks(row["model"] for row in rows)
    symbols = itertools.cycle(SYMBOLS)
    for row in rows:
        value = row[TEST]
        above, below = max(0.0, row[f"{TEST}/high"] - value), max(0.0, value - row[f"{TEST}/low"])
        error = {"type": "data", "array": [above], "arrayminus": [below]}
        style = _style(row["model"], looks[row["model"]], 0)
        style["marker"] |= {"size": 10, "symbol": next(symbols) if row["baseline"] else "circle"}
        figure.add_trace(Scatter(x=[row["test/coverage@10"]], y=[value], error_y=error, mode="markers", **style))
    figure.update_xaxes(title=WORDS["test/coverage@10"], tickformat=".0%")
    _name_axes(figure, [WORDS[TEST]])
    return figure


def masked_attention(before_LL: Sequence[Sequence[float]], after_LL: Sequence[Sequence[float]]) -> Figure:
    """Return two heat maps: rows are events that read, columns events that are read, counted back from the last.

    Args:
        before_LL: weights of the attention without masks.
        after_LL: the same with them.
    """
    figure = _panels(("attention of the last layer without masks", "with masks"), 2)
    back = list(range(1 - len(before_LL), 1))
    top = max(max(row) for row in before_LL)
    for panel, weights in enumerate((before_LL, after_LL)):
        heat = Heatmap(z=weights, x=back, y=back, zmin=0, zmax=top, colorscale="Blues", showscale=panel == 1)
        _add(figure, panel, 2, heat)
    figure.update_xaxes(title="event read")
    figure.update_yaxes(title="event that reads", autorange="reversed")
    return figure


def sparsity(points: Sequence[Point]) -> Figure:
    """Return accuracy and time of a model against the share of rows left out; a star marks the trained sparsity."""
    figure = _panels((f"{WORDS[SELECTION]}, served with fewer rows", "time per history, µs"), 2)
    shares = [point.sparsity for point in points]
    marks = {"symbol": ["star" if point.trained else "circle" for point in points], "size": 9, "color": COLOURS[0]}
    for panel, values in enumerate(([point.ndcg for point in points], [point.microseconds for point in points])):
        _add(figure, panel, 2, Scatter(x=shares, y=values, mode="lines+markers", marker=marks, showlegend=False))
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


def _name_axes(figure: Figure, words: Sequence[str]) -> None:
    for axis, text in zip(figure.select_yaxes(), words, strict=False):
        axis.title = text


def _looks(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return colour and dash of each name: no two models share both, and baselines are grey."""
    looks, models, baselines = {}, 0, 0
    for name in names:
        if name in BASELINES:
            looks[name] = {"color": GREYS[baselines % len(GREYS)], "dash": DASHES[baselines % len(DASHES)]}
            baselines += 1
        else:
            turn, colour = divmod(models, len(COLOURS))
            looks[name] = {"color": COLOURS[colour], "dash": DASHES[(colour + turn) % len(DASHES)]}
            models += 1
    return looks


def _style(name: str, look: Mapping[str, str], panel: int) -> dict[str, Any]:
    """Return the style of a model: the same in every panel, and in the legend only once."""
    marker = {"color": look["color"]}
    return {"name": name, "legendgroup": name, "showlegend": bool(name) and panel == 0, "marker": marker}


def _add(figure: Figure, panel: int, columns: int, trace: Any) -> None:
    figure.add_trace(trace, row=panel // columns + 1, col=panel % columns + 1)
