from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import EPOCH_RECORDS, contrast, linear_rgb, row

from seqrec.analysis import plots
from seqrec.analysis.strec_sparsity import Point
from seqrec.pipeline import BASELINES


def titles(figure):
    return [note.text for note in figure.layout.annotations]


def points(trace):
    return list(zip(trace.x, trace.y, strict=True))


def test_learning_curves_skip_the_epochs_without_validation():
    figure = plots.learning_curves({"sasrec": EPOCH_RECORDS, "popularity": []}, {})
    loss, metric = figure.data

    assert titles(figure) == ["training loss", "NDCG@10 on validation"]
    assert points(loss) == [(1, 6.0), (2, 5.0), (3, 4.5)]
    assert points(metric) == [(1, 0.1), (3, 0.2)]
    assert [(trace.name, trace.showlegend) for trace in figure.data] == [("sasrec", True), ("sasrec", False)]


def test_every_term_and_figure_of_a_model_is_a_curve():
    figure = plots.terms(EPOCH_RECORDS)

    assert titles(figure) == ["loss/task", "figure/entropy"]
    assert [points(trace) for trace in figure.data] == [
        [(1, 5.5), (2, 4.5), (3, 4.0)],
        [(1, 1.25), (2, 1.0), (3, 0.75)],
    ]
    assert plots.terms([{"loss": 1.0, "loss/task": 1.0}]) is None  # one term is the loss itself


def test_slices_get_one_panel_a_kind_and_one_bar_a_model():
    metrics = {
        "sasrec": {
            "test/ndcg@10": 0.5,
            "test/ndcg@10/low": 0.4,
            "test/ndcg@10/popularity=head": 0.3,
            "test/ndcg@10/popularity=head/low": 0.25,
            "test/ndcg@10/popularity=head/high": 0.4,
            "test/ndcg@10/popularity=cold": 0.1,
            "test/ndcg@10/length=1-10": 0.2,
            "test/cases/popularity=head": 1200,
        },
        "markov": {"test/ndcg@10/popularity=head": 0.25},
    }
    figure = plots.metric_by_slice(metrics)

    assert titles(figure) == [
        "NDCG@10 on test by popularity of the item",
        "NDCG@10 on test by length of the history",
    ]
    heads = ("head<br>1,200 cases", "cold")
    bars = [(bar.name, bar.xaxis, points(bar)) for bar in figure.data]
    assert bars == [
        ("sasrec", "x", [(heads[0], 0.3), (heads[1], 0.1)]),
        ("markov", "x", [(heads[0], 0.25), (heads[1], None)]),
        ("sasrec", "x2", [("1-10", 0.2)]),
        ("markov", "x2", [("1-10", None)]),
    ]
    ours, theirs, *_ = figure.data  # whiskers where there is an interval
    assert (ours.error_y.visible, theirs.error_y.visible) == (True, False)
    assert ours.error_y.color == plots.WHISKERS
    assert (ours.error_y.array[0], ours.error_y.arrayminus[0]) == pytest.approx((0.1, 0.05))


SEEN = {  # linear RGB as who lacks one kind of cone sees it: Vienot, Brettel and Mollon 1999
    "everybody": np.eye(3),
    "protanopia": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
    "deuteranopia": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
}


@pytest.mark.parametrize("eye", SEEN)
def test_the_colours_of_models_are_told_apart_by_colour_blind_readers(eye):
    seen = [SEEN[eye] @ linear_rgb(colour) for colour in plots.COLOURS]
    distance = min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))

    assert distance > 0.1  # of plotly's own colours: 0.02


@pytest.mark.parametrize("ground", ["#FFFFFF", "#16181C"])
def test_lines_stand_out_from_the_page_light_and_dark(ground):
    assert min(contrast(colour, ground) for colour in (*plots.COLOURS, *plots.GREYS)) >= 2
    assert contrast(plots.WHISKERS, ground) >= 3


def test_no_two_models_share_colour_and_dash_and_baselines_are_grey():
    names = [*(f"m{number}" for number in range(12)), *BASELINES]
    figure = plots.learning_curves(dict.fromkeys(names, EPOCH_RECORDS), {})
    looks = {trace.name: (trace.line.color, trace.line.dash) for trace in figure.data}

    assert len(set(looks.values())) == len(names)
    assert {name for name, (colour, _) in looks.items() if colour in plots.GREYS} == set(BASELINES)


def test_coverage_against_accuracy_draws_the_interval():
    figure = plots.coverage_against_accuracy([row("sasrec"), *(row(name, baseline=True) for name in BASELINES)])
    symbols = {trace.name: trace.marker.symbol for trace in figure.data}

    assert symbols["sasrec"] == "circle"
    assert len(set(symbols.values())) == 1 + len(BASELINES)
    for trace in figure.data:
        assert points(trace) == [(0.6, 0.2)]
        assert trace.error_y.array == pytest.approx((0.03,))
        assert trace.error_y.arrayminus == pytest.approx((0.02,))


def test_heat_maps_count_back_from_the_last_event_and_share_a_scale():
    before, after = plots.masked_attention([[1.0, 0.0], [0.25, 0.75]], [[1.0, 0.0], [0.0, 0.5]]).data

    assert (before.x, before.y) == ((-1, 0), (-1, 0))
    assert before.z == ([1.0, 0.0], [0.25, 0.75])
    assert after.z == ([1.0, 0.0], [0.0, 0.5])
    assert (after.zmin, after.zmax) == (before.zmin, before.zmax) == (0, 1.0)


def test_sparsity_marks_the_rows_of_the_training():
    chosen = [Point(sparsity=0.1 * i, ndcg=0.3 - 0.1 * i, microseconds=9.0 - i, trained=i == 1) for i in range(3)]
    accuracy, cost = plots.sparsity(chosen).data

    assert points(accuracy) == [(0.0, 0.3), (0.1, pytest.approx(0.2)), (0.2, pytest.approx(0.1))]
    assert cost.y == (9.0, 8.0, 7.0)
    assert accuracy.marker.symbol == cost.marker.symbol == ("circle", "star", "circle")
