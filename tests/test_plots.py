from __future__ import annotations

import io

import pytest

from seqrec import plots

HISTORY = [
    {"epoch": 1, "loss": 6.0, "valid/ndcg@10": 0.1},
    {"epoch": 2, "loss": 5.0},
    {"epoch": 3, "loss": 4.5, "valid/ndcg@10": 0.2},
]


def row(model, *, baseline=False):
    return {
        "model": model,
        "baseline": baseline,
        "test/ndcg@10": 0.2,
        "test/ndcg@10/low": 0.18,
        "test/ndcg@10/high": 0.23,
        "test/coverage@10": 0.6,
    }


def png_size(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return len(file.getvalue())


def labels(axis):
    return axis.get_legend_handles_labels()[1]


def test_learning_curves_skip_the_epochs_without_validation():
    figure = plots.learning_curves({"sasrec": HISTORY, "popularity": []})
    loss, metric = figure.axes

    assert loss.lines[0].get_xydata().tolist() == [[1, 6.0], [2, 5.0], [3, 4.5]]
    assert metric.lines[0].get_xydata().tolist() == [[1, 0.1], [3, 0.2]]
    assert labels(metric) == ["sasrec"]
    assert png_size(figure) > 1000


def test_slices_get_one_panel_a_kind_and_one_bar_a_model():
    metrics = {
        "sasrec": {
            "test/ndcg@10": 0.5,
            "test/ndcg@10/low": 0.4,
            "test/ndcg@10/popularity=head": 0.3,
            "test/ndcg@10/popularity=tail": 0.1,
            "test/ndcg@10/length=short": 0.2,
        },
        "markov": {"test/ndcg@10/popularity=head": 0.25},
    }
    figure = plots.metric_by_slice(metrics)
    popularity, length = figure.axes

    assert [axis.get_xlabel() for axis in figure.axes] == ["popularity", "length"]
    assert [text.get_text() for text in popularity.get_xticklabels()] == ["head", "tail"]
    assert [bar.get_height() for bar in popularity.patches] == [0.3, 0.1, 0.25, 0.0]
    assert [bar.get_height() for bar in length.patches] == [0.2, 0.0]


def test_coverage_against_accuracy_draws_the_interval():
    figure = plots.coverage_against_accuracy([row("sasrec"), row("markov", baseline=True)])
    (axis,) = figure.axes

    assert labels(axis) == ["sasrec", "markov"]
    (bar,) = axis.containers[0].lines[2]
    assert bar.get_segments()[0].tolist() == [[0.6, pytest.approx(0.18)], [0.6, pytest.approx(0.23)]]
    assert png_size(figure) > 1000


@pytest.mark.parametrize(
    "figure", [plots.learning_curves({}), plots.metric_by_slice({}), plots.coverage_against_accuracy([])]
)
def test_nothing_to_draw_is_an_empty_figure(figure):
    assert png_size(figure) > 1000
