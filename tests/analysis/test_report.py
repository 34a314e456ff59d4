"""The page: complete, true to its data, and with nothing to fetch or to run from the data."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs
from support import EPOCH_RECORDS, contrast, row

from seqrec.analysis import report
from seqrec.analysis.examples import Example, Examples, Opinion
from seqrec.analysis.strec_sparsity import Point

EVIL = '</script><script>alert("1 & 2")</script>'
ROWS = [
    row(name, baseline=name == "markov")
    | {"valid/ndcg@10": 0.3, "test/recall@10": 0.4, "test/mrr": 0.1, "parameters": 12345, "train_seconds": 7.0}
    | {"champion": name == "sasrec", "candidate": name == "sasrec"}
    for name in ("sasrec", "gru4rec", "markov")
]
OUTCOME = {
    "registered_model": "seqrec-toy",
    "version": 3,
    "model": "sasrec",
    "promoted": True,
    "reason": "the first <champion>",
}
BOARD = {"dataset": "toy", "protocol": "LOO-full", "rows": ROWS, "registry": OUTCOME}
BOARD |= {"verdict": {"sentence": "The best is sasrec & counts."}, "warnings": []}
METRICS = {name: {"test/ndcg@10/popularity=head": 0.25} for name in ("sasrec", "gru4rec", "markov")}
OPINIONS = {
    "sasrec": Opinion(best=[4, 2], rank=2.0, drop=[-0.5, 0.0, 1.0], attention=[0.125, 0.0, 0.5]),
    "gru4rec": Opinion(best=[2, 4], rank=1.0, drop=[0.0, 0.1, 0.0]),
    "markov": Opinion(best=[5], rank=30.5, drop=[0.0, 0.0, 0.0]),
}
NAMES = {1: "One", 2: "Two & a half", 3: "Three", 4: EVIL, 5: "Five"}
EXAMPLES = Examples(
    users=[Example(user_id="u<7>", history=[1, 3, 3], target=2, opinions=OPINIONS)],
    names=NAMES,
    masked={"sasrec": ([[1.0]], [[0.5]])},
    sparse={"gru4rec": [Point(sparsity=0.5, ndcg=0.1, microseconds=9.0, trained=True)]},
)


class Page(HTMLParser):
    """What a browser would find: scripts, attributes that fetch, the text of table rows."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.fetched, self.rows, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]
        if tag == "script":
            self.scripts.append((dict(attributes), ""))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def figures(self):
        return [json.loads(text) for attributes, text in self.scripts if attributes.get("type") == "application/json"]


@pytest.fixture(scope="module")
def text():
    return report.page(BOARD, METRICS, {"sasrec": EPOCH_RECORDS, "gru4rec": EPOCH_RECORDS[:1]}, EXAMPLES)


def test_the_page_holds_all_that_it_needs(text):
    page = Page(text)

    assert page.fetched == []
    assert not re.search(r"@import|url\(", report.STYLE)
    (code,) = [script for attributes, script in page.scripts if attributes.get("id") == "plotly"]
    assert gzip.decompress(base64.b64decode(code)).decode() == get_plotlyjs()
    assert len(text) < 2_200_000


def test_every_figure_is_there(text):
    titles = [[note["text"] for note in figure["layout"]["annotations"]] for figure in Page(text).figures()]

    assert titles == [
        ["NDCG@10 on test [95 %] against coverage"],
        ["NDCG@10 on test by popularity of the item"],
        ["training loss", "NDCG@10 on validation"],
        ["loss/task", "figure/entropy"],  # of sasrec
        ["attention of the last layer without masks", "with masks"],
        ["loss/task", "figure/entropy"],  # of gru4rec
        ["NDCG@10 on validation, served with fewer rows", "time per history, µs"],
    ]


def test_the_leaderboard_has_intervals_and_the_verdict(text):
    rows = Page(text).rows

    assert rows[1] == [
        "sasrec (champion)",
        "0.3000",
        "0.2000 [0.1800, 0.2300]",
        "0.4000",
        "0.1000",
        "0.6000",
        "12,345",
        "7",
    ]
    assert [cells[0] for cells in rows[1:4]] == ["sasrec (champion)", "gru4rec", "markov"]
    assert rows[3][-2:] == ["-", "-"]  # a baseline has no parameters and no training
    assert "seqrec-toy version 3 (sasrec) is the champion: the first &lt;champion&gt;" in text
    assert text.index("sasrec &amp; counts") < text.index("<table")  # the verdict comes first


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_either_scheme(scheme):
    light, _, dark = report.STYLE.partition("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]+)", light if scheme == "light" else dark))

    for text, ground in itertools.product(("text", "soft"), ("back", "hit")):
        if (text, ground) != ("soft", "hit"):  # nothing grey is marked
            assert contrast(colours[text], colours[ground]) >= 4.5  # WCAG 2.2, level AA


def test_lists_mark_the_held_out_item_and_end_where_a_list_ends(text):
    rows = Page(text).rows

    assert rows[4] == ["rank", "sasrec", "gru4rec", "markov"]
    assert rows[5] == ["1", EVIL, "Two & a half ✓", "Five"]
    assert rows[6] == ["2", "Two & a half ✓", EVIL, ""]
    assert rows[7] == ["3", "", "", ""]
    assert rows[15] == ["next item", "2", "1", "30.5"]


def test_the_history_says_what_drove_the_first_item_of_each_model(text):
    rows = Page(text).rows

    assert rows[16] == ["event, newest first", f"sasrec: why {EVIL}", "gru4rec: why Two & a half", "markov: why Five"]
    assert rows[17:] == [
        ["Three", "+1.000 (50%)", "", ""],
        ["Three", "", "+0.100", ""],
        ["One", "-0.500 (12%)", "", ""],
    ]


def test_nothing_of_the_data_becomes_markup(text):
    scripts = [attributes for attributes, _ in Page(text).scripts]

    assert sum(attributes == {} for attributes in scripts) == 1  # the page's own
    assert EVIL not in text
    assert "u<7>" not in text


def test_a_curve_that_ends_elsewhere_than_its_leaderboard_figure_says_why(text):
    (curves,) = [figure for figure in Page(text).figures() if len(figure["layout"]["annotations"]) == 2][:1]
    stars = {trace["name"]: trace["y"] for trace in curves["data"] if trace["marker"].get("symbol") == "star"}

    assert stars == {"sasrec": [0.3], "gru4rec": [0.3]}
    assert "A star marks the leaderboard figure of sasrec, gru4rec, which includes the count term" in text
    assert "A star" not in report.model_page("sasrec", EPOCH_RECORDS, EXAMPLES, 0.2)  # its curve ends at 0.2


def test_a_phone_and_a_screen_reader_get_the_whole_page(text):
    """A phone shows the head of each column beside its number; axe asks for `main` and regions of different names."""
    names = re.findall(r'role="region" aria-label="([^"]*)"', text)
    tables = re.findall(r"<table>.*?</table>", text, re.DOTALL)

    assert len(tables) == 3
    for table in tables:
        assert "<caption>" in table
        assert "<th>" not in table
        assert table.count('<th scope="row">') == table.count("<tr") - 1
    assert len(re.findall(r"<figure role=\"group\" aria-label=\"[^\"]", text)) == len(Page(text).figures())
    assert text.count("<main>") == text.count("</main>") == 1
    assert len(set(names)) == len(names) == 3
    assert re.findall(r'data-head="([^"]*)">([^<]*)', text)[:2] == [
        ("NDCG@10, validation", "0.3000"),
        ("NDCG@10, test [95 % interval]", "0.2000 [0.1800, 0.2300]"),
    ]


def test_a_page_without_examples_or_verdict():
    text = report.page(BOARD | {"registry": None}, METRICS, {}, Examples())

    assert "Examples" not in text
    assert "seqrec-toy" not in text


def test_a_models_own_page_has_its_curves_and_terms():
    figures = Page(report.model_page("sasrec", EPOCH_RECORDS, EXAMPLES, 0.2)).figures()
    titles = [figure["layout"]["annotations"][0]["text"] for figure in figures]

    assert titles == ["training loss", "loss/task", "attention of the last layer without masks"]
