"""Pages that need no other file and no network: the report of a pipeline run, and the figures of one model."""

from __future__ import annotations

import base64
import gzip
import html
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from seqrec.analysis import plots
from seqrec.analysis.examples import HIT_RANK, Example, Examples, Opinion
from seqrec.evaluation.leaderboard import decision
from seqrec.evaluation.metrics import SELECTION, TEST

LISTED = 10  # items of a list
MODELS = 3  # of an example, the best of the leaderboard; the others are folded
EVENTS = 100  # of a history, the last ones
HEADS = {  # of the leaderboard
    SELECTION: "NDCG@10, validation",
    TEST: "NDCG@10, test [95 % interval]",
    "test/recall@10": "recall@10, test",
    "test/mrr": "MRR, test",
    "test/coverage@10": "coverage@10, test",
    "parameters": "parameters",
    "train_seconds": "training, s",
}
TRAINED = ("parameters", "train_seconds")  # a baseline has no such figures
GLOSSARY = {
    "NDCG@10": "1 / log2(1 + rank) of the next item if it is in the top ten, else 0; the mean over all cases.",
    "recall@10": "The share of cases whose next item is in the top ten.",
    "MRR": "The mean of 1 / rank of the next item.",
    "rank": "The place of the next item among all candidates. Items with equal scores share the middle of their "
    "places, so that two items with equal scores on the places 30 and 31 both have rank 30.5.",
    "coverage@10": "The share of the catalogue that is recommended to at least one user.",
    "validation, test": "Events that no model is trained on: the last ones of a history, or those after a date. "
    "Validation chooses the model; test is only reported.",
    "head, tail, cold": "Cases whose next item is in the most popular fifth of the catalogue, by events of training; "
    "outside that fifth; or without an event of training.",
    "interval": "The range that holds 95 % of the means when users are resampled.",
}
STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --back: #ffffff; --soft: #595959; --line: #c8c8c8; --hit: #c8e6c9 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --back: #16181c; --soft: #a8a8a8; --line: #444; --hit: #1f5130 }
}
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em;
       color: var(--text); background: var(--back) }
.scroll { overflow-x: auto; max-width: 100% } .scroll:focus-visible { outline: 2px solid #56B4E9 }
table { border-collapse: collapse; margin: 1em 0 }
caption { text-align: left; color: var(--soft); padding: 0 .7em .4em }
th, td { padding: .2em .7em; text-align: left; vertical-align: top; overflow-wrap: anywhere }
tbody th { font-weight: inherit }
.board tbody th { white-space: nowrap }
thead th { border-bottom: 1px solid var(--line); font-weight: bold }
table:has(td.number) thead th + th { text-align: right }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
tr.champion, tr.champion th { font-weight: bold }
tr.baseline, .note, .facts { color: var(--soft) } td.target { background: var(--hit) }
.verdict { font-size: 1.15em } figure { margin: 1em 0 }
summary { cursor: pointer } summary h2, summary h3 { display: inline-block; margin: .6em 0 }
.events { max-height: 28em; overflow: auto; border: 1px solid var(--line) } .events table { margin: 0 }
.events thead th { position: sticky; top: 0; background: var(--back) } dt { font-weight: bold }
@media (max-width: 700px) {
  body { margin: .5em auto; padding: 0 .6em }
  table { table-layout: fixed; width: 100% }
  th, td, td.number { padding: .2em .3em; overflow-wrap: anywhere; white-space: normal }
  .scroll:not(.board) { font-size: .85em } .lists thead th:first-child { width: 3em }
  .events thead th:first-child { width: 34% }
  .board thead { display: none } .board table, .board tbody, .board caption { display: block }
  .board tr { display: grid; grid-template-columns: 1fr 1fr; padding: .5em 0; border-top: 1px solid var(--line) }
  .board caption { padding-left: .3em }
  .board tbody th { grid-column: 1 / -1; font-size: 1.1em } .board td.number { text-align: left }
  .board td::before { content: attr(data-head); display: block; color: var(--soft); font: .8em system-ui, sans-serif }
}
"""
SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: 700px)");
const axes = layout => Object.keys(layout).filter(key => /^[xy]axis/.test(key));
const paint = layout => {
  const text = dark.matches ? "#e6e6e6" : "#1b1b1b", grid = dark.matches ? "#3a3d42" : "#e3e3e3";
  Object.assign(layout, {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)"});
  layout.font = {...layout.font, color: text};
  for (const key of axes(layout)) Object.assign(layout[key], {gridcolor: grid, zerolinecolor: grid, linecolor: grid});
  return layout;
};
const stack = ({data, layout}) => {  // one panel a row; those of a grid that have no trace stay away
  const used = key => !data.length || data.some(trace => (trace.xaxis || "x") == key.replace("axis", ""));
  const panels = axes(layout).filter(key => key[0] == "x" && used(key)), count = panels.length;
  panels.forEach((key, place) => {
    const top = 1 - place / count, bottom = 1 - (place + 1) / count + (count > 1 ? 0.35 / count : 0);
    layout[key].domain = [0, 1];
    if (layout[key].title) layout[key].title.font = {size: 11};
    layout["y" + key.slice(1)].domain = [bottom, top];
    const note = (layout.annotations || [])[place];
    if (note) Object.assign(note, {x: 0.5, y: top, font: {size: 11}});
  });
  layout.height = 330 * count + 100;
  layout.legend = {orientation: "h", y: -70 / (330 * count - 90), yanchor: "top"};  // below the title of the axis
  layout.margin = {l: 50, r: 10, t: 40, b: 40};
};
const draw = place => {
  const figure = JSON.parse(place.dataset.figure || (place.dataset.figure = place.querySelector("script").textContent));
  if (narrow.matches) stack(figure);
  place.replaceChildren();
  Plotly.newPlot(place, figure.data, paint(figure.layout), {responsive: true, displayModeBar: false});
};
const folded = place => place.closest("details:not([open])");
const visible = () => [...document.querySelectorAll("div.figure")].filter(place => !folded(place));
const code = Uint8Array.from(atob(document.getElementById("plotly").textContent), letter => letter.charCodeAt(0));
const stream = new Blob([code]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(stream).text().then(text => {
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
  visible().forEach(draw);
  for (const part of document.querySelectorAll("details"))
    part.addEventListener("toggle", () => visible().filter(place => !place.dataset.figure).forEach(draw));
  for (const change of [dark, narrow]) change.addEventListener("change", () => visible().forEach(draw));
});
"""


def page(
    board: Mapping[str, Any],
    metrics: Mapping[str, Mapping[str, float]],
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    examples: Examples,
    facts: Mapping[str, str] | None = None,
) -> str:
    """Return the report of a pipeline run: verdict, leaderboard, figures, examples, glossary.

    Args:
        board: content of leaderboard.json.
        metrics: metrics of each model.
        histories: records of history.jsonl for each row of the leaderboard; empty for a baseline.
        examples: users to show.
        facts: shown below the title: date, commit, counts of the data.
    """
    rows, outcome = board["rows"], board["registry"]
    title = f"{board['dataset']}, {board['protocol']}"
    parts = [f"<h1>{html.escape(title)}</h1>", f'<p class="verdict">{html.escape(board["verdict"]["sentence"])}</p>']
    if facts:
        text = ", ".join(f"{name} {value}" for name, value in facts.items())
        parts.append(f'<p class="facts">{html.escape(text)}</p>')
    parts += [f"<p>About the data: {html.escape(text)}.</p>" for text in board["warnings"]]
    parts.append(_leaderboard(rows))
    if outcome:
        parts.append(f"<p>{html.escape(decision(outcome))}</p>")
    finals = {row["model"]: row[SELECTION] for row in rows}
    parts += [
        _section("Accuracy and coverage", [_figure(plots.coverage_against_accuracy(rows))]),
        _section("Slices", [_figure(plots.metric_by_slice(metrics))]),
        _section("Learning curves", _learning_curves(histories, finals)),
    ]
    for name, history in histories.items():
        figures = model_figures(name, history, examples)
        if figures:
            parts.append(_section(name, map(_figure, figures), folded=True))
    if examples.users:
        parts.append(_section("Examples", _examples(examples)))
    words = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in GLOSSARY.items())
    parts.append(_section("Glossary", [f"<dl>{words}</dl>"]))
    return _document(title, parts)


def _section(title: str, parts: Iterable[str], *, folded: bool = False) -> str:
    head = f"<summary><h2>{html.escape(title)}</h2></summary>"
    return f"<details{'' if folded else ' open'}>{head}{''.join(parts)}</details>"


def model_figures(name: str, history: Sequence[Mapping[str, Any]], examples: Examples) -> list[Figure]:
    """Return the figures that only one model has: terms of its loss, masks, sparsity."""
    figures = [plots.terms(history)]
    if name in examples.masked:
        figures.append(plots.masked_attention(*examples.masked[name]))
    if name in examples.sparse:
        figures.append(plots.sparsity(examples.sparse[name]))
    return [figure for figure in figures if figure]


def model_page(name: str, history: Sequence[Mapping[str, Any]], examples: Examples, final: float) -> str:
    """Return the figures of one model: its curves, and `model_figures`; `final` is its figure on the leaderboard."""
    figures = map(_figure, model_figures(name, history, examples))
    return _document(
        name, [f"<h1>{html.escape(name)}</h1>", *_learning_curves({name: history}, {name: final}), *figures]
    )


def _learning_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]], finals: Mapping[str, float]) -> list[str]:
    """Return the figure, and what a star in it means."""
    figure = plots.learning_curves(histories, finals)
    starred = [trace.name for trace in figure.data if trace.marker.symbol == "star"]
    return [_figure(figure), *(STAR.format(models=html.escape(", ".join(starred))) for _ in starred[:1])]


def _document(title: str, parts: Sequence[str]) -> str:
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    head += f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
    code = f'<script type="text/plain" id="plotly">{_plotly()}</script><script>{SCRIPT}</script>'
    return f"{head}<style>{STYLE}</style></head><body><main>{''.join(parts)}</main>{code}</body></html>\n"


@cache
def _plotly() -> str:
    """Return plotly.js, 4.8 MB, as 2 MB of text."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _figure(figure: Figure) -> str:
    content = figure.to_json().replace("<", "\\u003c")  # its text must not end the script element
    hint = "A figure: it needs JavaScript, and a browser of 2023 or later."
    words = html.escape("; ".join(note.text for note in figure.layout.annotations if note.text))
    drawing = f'<div class="figure"><script type="application/json">{content}</script>{hint}</div>'
    return f'<figure role="group" aria-label="{words}">{drawing}</figure>'


def _leaderboard(rows: Sequence[Mapping[str, Any]]) -> str:
    body = []
    for row in rows:
        mark = " (champion)" if row["champion"] else " (candidate)" if row["candidate"] else ""
        style = "champion" if row["champion"] else "baseline" if row["baseline"] else ""
        cells = [
            _head(html.escape(row["model"]) + mark),
            *(_named(_value(row, key), head) for key, head in HEADS.items()),
        ]
        body.append(f'<tr class="{style}">{"".join(cells)}</tr>')
    caption = "Leaderboard by NDCG@10 on validation; baselines are grey."
    return _table(("model", *HEADS.values()), body, caption, "board")


def _value(row: Mapping[str, Any], key: str) -> str:
    if row["baseline"] and key in TRAINED:
        return "-"
    if key == TEST:
        return f"{row[key]:.4f} [{row[f'{key}/low']:.4f}, {row[f'{key}/high']:.4f}]"
    return f"{row[key]:.4f}" if "@" in key or key.endswith("mrr") else f"{row[key]:,.0f}"


STAR = """
<p class="note">A star marks the leaderboard figure of {models}, which includes the count term. The count term is fitted
after training; the curve shows the model alone.</p>
"""
EXPLANATION = f"""
<p>Users drawn at random. For half of them, if there are enough, the best model ranked the next item in its top
{HIT_RANK}. <b>Why</b> shows how much the score of a model's first item drops when one event is left out (darker: more;
negative: the event speaks against the item). The number in brackets is the event's share of the attention in the last
layer, for models with attention over events. Scores of two models are on different scales.</p>
"""


def _examples(examples: Examples) -> list[str]:
    """Return the first and the last user, who differ most in how well they were served, and the others folded."""
    users, names = examples.users, examples.names
    first, others = [*users[:1], *users[1:][-1:]], users[1:-1]
    return [
        EXPLANATION,
        *(_example(user, names) for user in first),
        *(_folded(f"User {user.user_id}", _example(user, names)) for user in others),
    ]


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def _example(user: Example, names: Mapping[int, str]) -> str:
    best, others = dict(list(user.opinions.items())[:MODELS]), dict(list(user.opinions.items())[MODELS:])
    head = f"<h3>User {html.escape(user.user_id)}</h3><p>Next was <b>{html.escape(names[user.target])}</b>.</p>"
    parts = [head, _opinions(user, best, names, "the best models")]
    if others:
        content = _opinions(user, others, names, "the other models")
        parts.append(_folded(f"User {user.user_id}: {', '.join(others)}", content))
    return "".join(parts)


def _opinions(user: Example, opinions: Mapping[str, Opinion], names: Mapping[int, str], whose: str) -> str:
    return _lists(user, opinions, names, whose) + _drivers(user, opinions, names, whose)


def _lists(user: Example, opinions: Mapping[str, Opinion], names: Mapping[int, str], whose: str) -> str:
    body = []
    for index in range(LISTED):
        items = [next(iter(opinion.best[index : index + 1]), None) for opinion in opinions.values()]
        cells = [_cell("") if item is None else _item(item, user.target, names) for item in items]
        body.append(f"<tr>{_head(str(index + 1))}{''.join(cells)}</tr>")
    ranks = "".join(_cell(f"{opinion.rank:g}") for opinion in opinions.values())
    body.append(f'<tr class="note">{_head("next item")}{ranks}</tr>')
    caption = f"What {whose} recommend to user {user.user_id}; below, the rank of the next item."
    return _table(("rank", *opinions), body, caption, "lists")


def _item(item: int, target: int, names: Mapping[int, str]) -> str:
    return _cell(html.escape(names[item]) + (" ✓" if item == target else ""), "target" if item == target else "")


def _drivers(user: Example, opinions: Mapping[str, Opinion], names: Mapping[int, str], whose: str) -> str:
    """Return the history, newest event first, with what each event does to every model's first item."""
    driven = {name: opinion for name, opinion in opinions.items() if opinion.best}
    heads = [f"{name}: why {names[opinion.best[0]]}" for name, opinion in driven.items()]
    body = []
    for position in range(len(user.history) - 1, max(-1, len(user.history) - 1 - EVENTS), -1):
        cells = "".join(_why(opinion, position) for opinion in driven.values())
        body.append(f"<tr>{_head(html.escape(names[user.history[position]]))}{cells}</tr>")
    earlier = max(0, len(user.history) - EVENTS)
    note = f'<p class="note">{earlier:,} earlier events are not shown.</p>' if earlier else ""
    caption = f"How each past event of user {user.user_id} changes the score of the first item of {whose}."
    table = _table(("event, newest first", *heads), body, caption)
    return f'<div class="events">{table}</div>{note}'


def _why(opinion: Opinion, position: int) -> str:
    drop, most = opinion.drop[position], max(map(abs, opinion.drop))
    red, green, blue = (33, 102, 172) if drop > 0 else (178, 24, 43)
    shade = 0.6 * abs(drop) / most if most else 0.0
    weight = None if opinion.attention is None else opinion.attention[position]
    if not drop and not weight:  # outside the model's window
        return _cell("")
    read = "" if weight is None else f" ({weight:.0%})"
    style = f' style="background: rgba({red}, {green}, {blue}, {shade:.2f})"'
    return f'<td class="number"{style}>{drop:+.3f}{read}</td>'


def _table(heads: Sequence[str], body: Sequence[str], caption: str, kind: str = "") -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heads)
    rows = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    table = f"<table><caption>{html.escape(caption)}</caption>{rows}</table>"
    style = f"scroll {kind}".strip()
    return f'<div class="{style}" tabindex="0" role="region" aria-label="{html.escape(caption)}">{table}</div>'


def _head(content: str) -> str:
    return f'<th scope="row">{content}</th>'


def _cell(content: str, kind: str = "") -> str:
    return f'<td class="{kind}">{content}</td>' if kind else f"<td>{content}</td>"


def _named(number: str, head: str) -> str:
    """Return a cell that carries its column's head, which a phone shows above the number."""
    return f'<td class="number" data-head="{html.escape(head)}">{number}</td>'
