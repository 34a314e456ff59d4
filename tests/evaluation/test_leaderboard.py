from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console
from support import case_table

from seqrec.artifacts import write_json, write_table
from seqrec.evaluation import leaderboard


def write_metrics(reports, name, valid, **changes):
    metrics = {
        "valid/ndcg@10": valid,
        "test/ndcg@10": 0.2,
        "test/ndcg@10/low": 0.1875,
        "test/ndcg@10/high": 0.2125,
        "test/recall@10": 0.31,
        "test/mrr": 0.17,
        "test/coverage@10": 0.625,
        "parameters": 12345678,
        "train_seconds": 61.6,
        "test/gini@10": 0.9,
    } | changes
    write_json(reports / name / "metrics.json", metrics)


@pytest.fixture
def reports(tmp_path):
    write_metrics(tmp_path, "sasrec", 0.11, **{"test/ndcg@10": 0.9})  # best on test, not on validation
    write_metrics(tmp_path, "rec_denoiser", 0.12)
    write_metrics(tmp_path, "popularity", 0.04)
    write_metrics(tmp_path, "markov", 0.13, parameters=0)
    return tmp_path


@pytest.fixture
def rows(reports):
    return leaderboard.build(reports=reports, models=["sasrec", "rec_denoiser"])


def shown(reports, rows, capsys, outcome=None):
    """Return what is printed of a leaderboard with these rows, and with this outcome of the gate."""
    board = {
        "rows": rows,
        "verdict": {"sentence": "A verdict.", "gain": None, "baseline": None},
        "warnings": [],
        "registry": outcome,
    }
    (reports / "leaderboard.json").write_text(json.dumps(board))
    leaderboard.show(reports=reports)
    return capsys.readouterr().out


def test_the_folder_of_a_run_is_answered_with_that_of_its_reports(tmp_path):
    write_json(tmp_path / "reports" / "leaderboard.json", {})

    with pytest.raises(FileNotFoundError, match=f"not found: name --reports {tmp_path}/reports$"):
        leaderboard.show(reports=tmp_path)


def test_rows_are_ordered_by_validation_and_test_chooses_nothing(rows):
    assert [row["model"] for row in rows] == ["markov", "rec_denoiser", "sasrec", "popularity"]
    assert [row["baseline"] for row in rows] == [True, False, False, True]


def test_a_missing_report_names_the_model(reports):
    with pytest.raises(FileNotFoundError, match=r"bert4rec.metrics.json not found; evaluate bert4rec first"):
        leaderboard.build(reports=reports, models=["bert4rec"])


def test_a_missing_number_names_file_and_key(reports):
    path = reports / "sasrec" / "metrics.json"
    metrics = json.loads(path.read_text())
    del metrics["test/mrr"]
    path.write_text(json.dumps(metrics))

    with pytest.raises(ValueError, match=r"sasrec.metrics.json has no test/mrr"):
        leaderboard.build(reports=reports, models=["sasrec"])


def test_table_shows_every_number_and_marks_the_champion(rows):
    rows[1] |= {"champion": True, "candidate": True}
    console = Console(width=80, file=io.StringIO())
    console.print(leaderboard.render(rows))
    text = console.file.getvalue()

    line = next(line for line in text.splitlines() if "rec_denoiser" in line)
    for cell in ("rec_denoiser *", "0.1200", "0.2000 [.1875, .2125]", "0.3100", "0.1700", "0.625", "12.3M", "62"):
        assert cell in line
    assert "* champion" in text


def test_show_prints_the_table_and_the_decision(reports, rows, capsys):
    outcome = {"registered_model": "seqrec-toy", "version": 2, "model": "rec_denoiser", "champion": "f"}
    outcome |= {"promoted": False, "reason": "gain +0.01 [-0.01, +0.03]"}

    printed = shown(reports, rows, capsys, outcome)

    assert "rec_denoiser" in printed
    assert "seqrec-toy version 2 (rec_denoiser) is the candidate" in printed
    assert "[-0.01, +0.03]" in printed
    assert printed.splitlines()[-2].startswith("Use the champion of seqrec-toy, which this run did not replace")
    assert printed.splitlines()[-1] == f"python -m seqrec serve --params {reports.parent}/params.yaml"
    assert "index.html" not in printed
    (reports / "index.html").touch()
    assert f"{reports}/index.html shows" in shown(reports, rows, capsys, outcome).replace("\n", "")


def test_a_model_below_the_best_baseline_is_a_red_line(reports, rows, capsys):
    below = leaderboard.below_baseline(rows)
    table = leaderboard.render(rows)

    assert (leaderboard.best_baseline(rows)["model"], below) == ("markov", ["rec_denoiser", "sasrec"])
    styles = dict(zip((row["model"] for row in rows), (row.style for row in table.rows), strict=True))
    assert {name for name, style in styles.items() if style == "red"} == set(below)
    assert "sasrec scores below the best baseline, markov" in shown(reports, rows, capsys)


def test_curves_have_a_row_a_point_and_none_where_nothing_was_measured(tmp_path):
    history = [{"valid/ndcg@10": 0.1}, {}, {"valid/ndcg@10": 0.3}]
    leaderboard.write_curves(tmp_path / "curves.csv", {"sasrec": history, "gru4rec": history[:1]})

    assert (tmp_path / "curves.csv").read_text().splitlines() == [
        "model,epoch,valid/ndcg@10",
        "sasrec,1,0.1",
        "sasrec,3,0.3",
        "gru4rec,1,0.1",
    ]


def write_cases(reports, name, rank):
    """These ranks on validation, and 1 in every test case."""
    tables = [case_table(*rank), case_table(*[1.0] * len(rank), split="test")]
    write_table(reports / name / "cases.parquet", pa.concat_tables(tables))


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ([1.0] * 40, "rec_denoiser is reliably better than the baselines. It beats the best baseline, markov, by +"),
        ([2.0] * 40, "No trained model is reliably better than the baselines. rec_denoiser, the best, differs"),
        ([1.0, 5.0] * 20, "No trained model is reliably better"),  # the interval of the gain holds 0
    ],
)
def test_the_verdict_says_whether_a_model_beats_the_baselines(reports, rows, ranks, sentence):
    write_cases(reports, "rec_denoiser", ranks)
    write_cases(reports, "markov", [2.0] * 40)

    found = leaderboard.verdict(reports, rows)

    assert found["sentence"].startswith(sentence)
    assert found["sentence"].endswith(" On test, the difference is +0.0000 [+0.0000, +0.0000].")
    assert (found["model"], found["baseline"]) == ("rec_denoiser", "markov")


@pytest.mark.parametrize(
    ("winner", "gain", "reason"),
    [
        ("sasrec", (0.02, 0.01, 0.03), "Use sasrec; it is 0.0200 NDCG@10 better than pctm, the best baseline,"),
        ("sasrec", (0.02, -0.01, 0.05), "on validation, which may be chance:"),
        (
            "pctm",
            (-0.02, -0.03, -0.01),
            "Use pctm, a baseline; sasrec, the best trained model, is 0.0200 NDCG@10 worse",
        ),
        ("sasrec", (0.0, 0.0, 0.0), "Use sasrec; it is as good as pctm, the best baseline, on validation:"),
        ("pctm", (-1e-5, -0.01, 0.01), "sasrec, the best trained model, is as good on validation:"),
        ("pctm", None, "Use pctm, the best on validation:"),
    ],
)
def test_the_last_lines_say_what_to_use_why_and_how(winner, gain, reason):
    verdict = {"model": "sasrec", "baseline": "pctm"}
    verdict["gain"] = gain and dict(zip(("mean", "low", "high"), gain, strict=True))
    report = {"rows": [{"model": winner}], "verdict": verdict, "registry": None}

    said, command = leaderboard.advice(report, Path("my out"))

    assert reason in said
    assert (
        command == f"python -m seqrec serve --params 'my out/params.yaml' --saved 'my out/artifacts/{winner}/finetuned'"
    )


def test_a_champion_that_stays_is_served_by_the_name_of_its_dataset():
    outcome = {"champion": "1", "promoted": False, "registered_model": "seqrec-other"}
    lines = leaderboard.advice({"registry": outcome, "dataset": "other"}, Path())
    assert lines[-1] == "python -m seqrec serve --dataset other"


def test_without_a_model_nothing_beats_the_baselines(reports):
    rows = leaderboard.build(reports=reports, models=[])

    assert leaderboard.verdict(reports, rows)["sentence"].startswith("This run has no trained model")
