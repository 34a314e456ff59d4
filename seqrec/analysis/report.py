"""Pages that need no other file and no network: the report of a pipeline run, and the figures of one model."""

from __future__ import annotations

import base64
import gzip
import html
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from seqrec.analysis import plots
from seqrec.analysis.examples import FOUND, Example, Examples, Opinion
from seqrec.evaluation.leaderboard import SELECTION

LISTED = 10  # items of a list
EVENTS = 100  # of a history, the last ones
COLUMNS = (SELECTION, "test/ndcg@10", "test/recall@10", "test/mrr", "test/coverage@10", "parameters", "train_seconds")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .2em .7em; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #888 }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
tr.champion { font-weight: bold } tr.baseline, .note { color: #666 } td.target { background: #c8e6c9 }
.events { max-height: 28em; overflow-y: auto; border: 1px solid #ddd } .events table { margin: 0 }
.events th { position: sticky; top: 0; background: white }
"""
SCRIPT = """
const code = Uint8Array.from(atob(document.getElementById("plotly").textContent), letter => letter.charCodeAt(0));
const stream = new Blob([code]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(stream).text().then(text => {
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
  for (const place of document.querySelectorAll("div.figure")) {
    const figure = JSON.parse(place.querySelector("script").textContent);
    place.replaceChildren();
    Plotly.newPlot(place, figure.data, figure.layout, {responsive: true, displaylogo: false});
  }
});
"""


def page(
    board: Mapping[str, Any],
    metrics: Mapping[str, Mapping[str, float]],
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    examples: Examples,
) -> str:
    """Return the report of a pipeline run: leaderboard, verdict of the gate, figures, examples.

    Args:
        board: what leaderboard.json holds.
        metrics: of each model.
        histories: of each row of the leaderboard, the records of history.jsonl; none of a baseline.
        examples: users to show.
    """
    rows, outcome = board["rows"], board["registry"]
    title = f"{board['dataset']}, {board['protocol']}"
    parts = [f"<h1>{html.escape(title)}</h1>", _leaderboard(rows)]
    if outcome:
        verdict = (
            f"{outcome['registered_model']} version {outcome['version']} ({outcome['model']}): {outcome['reason']}"
        )
        parts.append(f"<p>{html.escape(verdict)}</p>")
    parts += [
        "<h2>Accuracy and coverage</h2>",
        _figure(plots.coverage_against_accuracy(rows)),
        "<h2>Slices</h2>",
        _figure(plots.metric_by_slice(metrics)),
        "<h2>Learning curves</h2>",
        _figure(plots.learning_curves(histories)),
    ]
    for name, history in histories.items():
        figures = model_figures(name, history, examples)
        if figures:
            parts += [f"<h3>{html.escape(name)}</h3>", *map(_figure, figures)]
    if examples.users:
        parts += ["<h2>Examples</h2>", EXPLANATION, *(_example(user, examples.names) for user in examples.users)]
    return _document(title, parts)


def model_figures(name: str, history: Sequence[Mapping[str, Any]], examples: Examples) -> list[Figure]:
    """Return what there is to see of one model alone: terms of its loss, masks, sparsity."""
    figures = [plots.terms(history)]
    if name in examples.masked:
        figures.append(plots.masked_attention(*examples.masked[name]))
    if name in examples.sparse:
        figures.append(plots.sparsity(examples.sparse[name]))
    return [figure for figure in figures if figure]


def model_page(name: str, history: Sequence[Mapping[str, Any]], examples: Examples) -> str:
    """Return the figures of one model: its curves, and `model_figures`."""
    figures = [plots.learning_curves({name: history}), *model_figures(name, history, examples)]
    return _document(name, [f"<h1>{html.escape(name)}</h1>", *map(_figure, figures)])


def _document(title: str, parts: Sequence[str]) -> str:
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
    code = f'<script type="text/plain" id="plotly">{_plotly()}</script><script>{SCRIPT}</script>'
    return f"{head}<style>{STYLE}</style></head><body>{''.join(parts)}{code}</body></html>\n"


@cache
def _plotly() -> str:
    """Return plotly.js, 4.8 MB, as 2 MB of text."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _figure(figure: Figure) -> str:
    content = figure.to_json().replace("<", "\\u003c")  # nothing in it may end the script
    hint = "A figure: it needs JavaScript, and a browser of 2023 or later."
    return f'<div class="figure"><script type="application/json">{content}</script>{hint}</div>'


def _leaderboard(rows: Sequence[Mapping[str, Any]]) -> str:
    body = []
    for row in rows:
        mark = " (champion)" if row["champion"] else " (candidate)" if row["candidate"] else ""
        style = "champion" if row["champion"] else "baseline" if row["baseline"] else ""
        cells = [_cell(html.escape(row["model"]) + mark), *(_number(_value(row, key)) for key in COLUMNS)]
        body.append(f'<tr class="{style}">{"".join(cells)}</tr>')
    return _table(("model", *COLUMNS), body)


def _value(row: Mapping[str, Any], key: str) -> str:
    if key == plots.METRIC:
        return f"{row[key]:.4f} [{row[f'{key}/low']:.4f}, {row[f'{key}/high']:.4f}]"
    return f"{row[key]:.4f}" if "@" in key or key.endswith("mrr") else f"{row[key]:,.0f}"


EXPLANATION = f"""
<p>Users drawn at random: half of them with a next item that the best model has among its {FOUND} best, half without, as
far as there are such. <b>Why</b> looks at a model's first item: by how much its score drops when one event is left out
(darker: more; negative: the event speaks against it), and in brackets, where the model has attention over events, the
share that its last layer pays to it. Scores of two models are on different scales.</p>
"""


def _example(user: Example, names: Mapping[int, str]) -> str:
    head = f"<h3>User {html.escape(user.user_id)}</h3><p>Next was <b>{html.escape(names[user.target])}</b>.</p>"
    return head + _lists(user, names) + _drivers(user, names)


def _lists(user: Example, names: Mapping[int, str]) -> str:
    body = []
    for place in range(LISTED):
        items = [next(iter(opinion.best[place : place + 1]), None) for opinion in user.opinions.values()]
        cells = [_cell("") if item is None else _item(item, user.target, names) for item in items]
        body.append(f"<tr>{_number(str(place + 1))}{''.join(cells)}</tr>")
    ranks = "".join(_cell(f"{opinion.rank:g}") for opinion in user.opinions.values())
    body.append(f'<tr class="note"><td>rank of the next item</td>{ranks}</tr>')
    return _table(("recommended", *user.opinions), body)


def _item(item: int, target: int, names: Mapping[int, str]) -> str:
    return _cell(html.escape(names[item]) + (" ✓" if item == target else ""), "target" if item == target else "")


def _drivers(user: Example, names: Mapping[int, str]) -> str:
    """Return the history, newest event first, with what each event does to every model's first item."""
    driven = {name: opinion for name, opinion in user.opinions.items() if opinion.drop is not None and opinion.best}
    heads = [f"{name}: why {names[opinion.best[0]]}" for name, opinion in driven.items()]
    body = []
    for place in range(len(user.history) - 1, max(-1, len(user.history) - 1 - EVENTS), -1):
        cells = "".join(_why(opinion, place) for opinion in driven.values())
        body.append(f"<tr>{_cell(html.escape(names[user.history[place]]))}{cells}</tr>")
    earlier = max(0, len(user.history) - EVENTS)
    note = f'<p class="note">{earlier:,} earlier events are not shown.</p>' if earlier else ""
    return f'<div class="events">{_table(("event, newest first", *heads), body)}</div>{note}'


def _why(opinion: Opinion, place: int) -> str:
    assert opinion.drop is not None
    drop, most = opinion.drop[place], max(map(abs, opinion.drop))
    red, green, blue = (33, 102, 172) if drop > 0 else (178, 24, 43)
    shade = 0.6 * abs(drop) / most if most else 0.0
    weight = None if opinion.attention is None else opinion.attention[place]
    if not drop and not weight:  # the model does not see it
        return _cell("")
    read = "" if weight is None else f" ({weight:.0%})"
    style = f' style="background: rgba({red}, {green}, {blue}, {shade:.2f})"'
    return f'<td class="number"{style}>{drop:+.3f}{read}</td>'


def _table(heads: Sequence[str], body: Sequence[str]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cell(content: str, kind: str = "") -> str:
    return f'<td class="{kind}">{content}</td>' if kind else f"<td>{content}</td>"


def _number(content: str) -> str:
    return _cell(content, "number")
