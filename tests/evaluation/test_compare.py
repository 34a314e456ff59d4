"""`seqrec compare`: gains against hand arithmetic, p-values against enumeration, and what must not be compared."""

from __future__ import annotations

import itertools
import json
from math import log2
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support import prepare_rows, save, synthetic_rows

from seqrec.__main__ import main
from seqrec.artifacts import CASES_SCHEMA, write_json, write_table
from seqrec.config import EvaluateConfig
from seqrec.data import sequences
from seqrec.evaluation import compare as module
from seqrec.evaluation import intervals
from seqrec.evaluation.compare import compare, sign_flip_p_value
from seqrec.stages.baselines import baselines
from seqrec.stages.evaluate import evaluate

# (user, position, target), and the ranks of two runs
TARGETS = [(1, 4, 7), (2, 12, 3), (3, 60, 9), (4, 5, 1)]
ONE = [1.0, 2.0, 30.0, 11.0]
OTHER = [3.0, 2.0, 1.0, 7.0]


def write_report(folder: Path, ranks: list[float], targets=TARGETS, *, filter_seen: int = 1):
    """A report whose valid and test cases are `targets` with `ranks`."""
    cases = list(zip(targets, ranks, strict=True))
    rows = [(split, *target, rank, 0) for split in ("valid", "test") for target, rank in cases]
    columns = [pa.array(column, type=f.type) for column, f in zip(zip(*rows, strict=True), CASES_SCHEMA, strict=True)]
    write_table(folder / "cases.parquet", pa.table(columns, schema=CASES_SCHEMA))
    write_json(folder / "metrics.json", {"filter_seen": filter_seen})
    return str(folder)


def gains_of(folder: Path, ranks: list[float], others: list[float], targets=TARGETS, **options):
    """Return the gains of a run with `ranks` over another one."""
    names = [write_report(folder / "one", ranks, targets), write_report(folder / "other", others, targets)]
    return compare(names, **options)["others"][names[1]]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_gains_by_hand(tmp_path, split):
    gains = gains_of(tmp_path, ONE, OTHER)[split]

    ndcg = gains["ndcg@10"]
    ours, theirs = [1, 1 / log2(3), 0, 0], [1 / 2, 1 / log2(3), 1, 1 / 3]
    assert ndcg["first"] == pytest.approx(sum(ours) / 4)
    assert ndcg["other"] == pytest.approx(sum(theirs) / 4)
    assert ndcg["gain"] == pytest.approx((1 / 2 + 0 - 1 - 1 / 3) / 4)
    assert (ndcg["users_better"], ndcg["users_equal"], ndcg["users_worse"]) == (1, 1, 2)
    # +-1/2 +-1 +-1/3 is at least 5/6 away from 0 for all signs but +-+ and -+-
    assert ndcg["p_value"] == pytest.approx(6 / 8)
    recall = gains["recall@10"]
    assert (recall["first"], recall["other"], recall["gain"]) == (2 / 4, 4 / 4, -2 / 4)
    assert (recall["users_better"], recall["users_equal"], recall["users_worse"]) == (0, 2, 2)
    assert recall["p_value"] == pytest.approx(2 / 4)  # -1 -1 and +1 +1 of four
    assert (gains["cases"], gains["users"]) == (4, 4)


def test_the_interval_is_that_of_the_gate(tmp_path):
    generator = np.random.default_rng(0)
    targets = [(user, 20, 1) for user in range(1, 81)]
    ranks = [generator.integers(1, 15, 80).astype(float).tolist() for _ in range(2)]

    found = gains_of(tmp_path, *ranks, targets, confidence=0.9, seed=7)["valid"]["ndcg@10"]

    tables = [module._read(str(tmp_path / name)).cases for name in ("one", "other")]
    expected = intervals.paired_gain(*tables, split="valid", confidence=0.9, seed=7)
    assert (found["gain"], found["low"], found["high"]) == expected


def test_the_cases_of_a_user_count_as_one_user(tmp_path):
    """Two users of many cases: the first's ranks are permuted, a sum of 0; the second's are 1 - 1/3 apart."""
    ranks = [1.0, 4.0, 2.0]  # the differences sum to -5.6e-17 in floats
    targets = [(1, 4, 7), (1, 5, 7), (1, 6, 7), (2, 4, 7), (2, 5, 8)]

    gains = gains_of(tmp_path, [*ranks, 1.0, 11.0], [*ranks[1:], ranks[0], 11.0, 7.0], targets)["test"]

    ndcg = gains["ndcg@10"]
    assert (gains["cases"], gains["users"]) == (len(targets), 2)
    assert (ndcg["users_better"], ndcg["users_equal"], ndcg["users_worse"]) == (1, 1, 0)
    assert ndcg["gain"] == pytest.approx((1 - 1 / 3) / len(targets))
    assert ndcg["p_value"] == 1.0


@pytest.mark.parametrize("size", [2, 4, 7])
def test_the_p_value_of_few_users_is_the_enumerated_one(size):
    total = np.random.default_rng(size).choice([-1.0, -0.5, 0.0, 0.25, 0.63, 1.0], size=size)

    flips = itertools.product((1, -1), repeat=len(total))
    sums = [abs(sum(sign * value for sign, value in zip(signs, total, strict=True))) for signs in flips]
    share = np.mean([value >= abs(sum(total)) - 1e-9 for value in sums])

    assert sign_flip_p_value(total, seed=0) == pytest.approx(share)


def test_the_p_value_of_many_users_is_close_to_the_exact_one():
    total = np.random.default_rng(1).normal(0.25, 1.0, size=module.EXACT_USERS + 2).round(1)
    total[total == 0] = 0.1
    signs = 1 - 2 * (np.arange(2 ** len(total))[:, None] >> np.arange(len(total)) & 1)  # all of them
    exact = (np.abs(signs @ total) >= abs(total.sum()) - 1e-9).mean()
    assert 0.02 < exact < 0.98

    assert sign_flip_p_value(total, seed=0) == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / module.FLIPS))
    assert sign_flip_p_value(total, seed=0) == sign_flip_p_value(total, seed=0)


def test_no_p_value_is_zero_and_no_difference_has_p_value_one():
    assert sign_flip_p_value(np.ones(500), seed=0) == pytest.approx(1 / (module.FLIPS + 1))
    assert sign_flip_p_value(np.zeros(500), seed=0) == 1.0


def test_several_others_and_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    ranks = {"one": ONE, "other": OTHER, "third": [1.0] * 4}
    names = [write_report(tmp_path / name, rank) for name, rank in ranks.items()]

    assert main(["compare", *names, "--metrics", str(tmp_path / "out.json")]) == 0

    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["others"]) == names[1:]
    assert result == compare(names)
    shown = capsys.readouterr().out
    assert "test ndcg@10" in shown
    assert "length=51+ (1)" in shown
    assert "1/1/2" in shown
    assert "…" not in shown


def test_different_splits_are_refused_though_their_cases_are_the_same(tmp_path):
    names = [write_report(tmp_path / run / "reports" / "sasrec", ONE) for run in ("a", "b")]
    cards = [tmp_path / run / "data" / "sequences" / "split.json" for run in ("a", "b")]
    for card, digit in zip(cards, "12", strict=True):
        write_json(card, {"split_sha256": digit * 64})
    with pytest.raises(ValueError, match="evaluated on different splits, 111111111111 and 222222222222"):
        compare(names)

    write_json(cards[1], {"split_sha256": "1" * 64})
    assert compare(names)["split_sha256"] == "1" * 64


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["one"], "at least two"),
        (["one", "one"], "one is named twice"),
        (["one", "nowhere"], "nowhere holds no metrics.json"),
        (["one", "unfiltered"], "differ in filter_seen"),
        (["one", "else"], "one and else, valid: .*different cases: compare runs of one split only"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, monkeypatch, runs, message):
    monkeypatch.chdir(tmp_path)
    write_report(Path("one"), ONE)
    write_report(Path("unfiltered"), OTHER, filter_seen=0)
    write_report(Path("else"), OTHER, [*TARGETS[:3], (4, 5, 2)])
    with pytest.raises((ValueError, OSError), match=message):
        compare(runs)


def test_a_run_is_named_by_its_output_folder(tmp_path):
    for model in ("sasrec", "popularity"):
        write_report(tmp_path / "a" / "reports" / model, ONE)
    write_report(tmp_path / "b" / "reports" / "sasrec", OTHER)
    write_report(tmp_path / "b" / "reports" / "flash4rec", OTHER)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")

    assert list(compare([a, f"{b}:flash4rec", f"{a}:popularity"])["others"]) == [f"{b}:flash4rec", f"{a}:popularity"]
    with pytest.raises(ValueError, match=r"b holds the models flash4rec, sasrec: name one, as in .*b:MODEL"):
        compare([a, b])

    write_report(tmp_path / "c" / "reports" / "popularity", OTHER)  # the folder of a baseline fitted in Python
    assert list(compare([a, str(tmp_path / "c")])["others"]) == [str(tmp_path / "c")]
    with pytest.raises(FileNotFoundError, match=r"no evaluated model gru4rec, but flash4rec, sasrec"):
        compare([a, f"{b}:gru4rec"])


@pytest.fixture(scope="module")
def evaluated(prepared, tmp_path_factory) -> list[str]:
    """Two models with different weights, evaluated by the stage."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name in ("r1", "r2"):
        paths = {"checkpoint": save("sasrec", prepared, folder / f"model-{name}"), "report": folder / name}
        evaluate(model="sasrec", sequences=prepared, **paths, config=EvaluateConfig(bootstrap=100))
    return [str(folder / "r1"), str(folder / "r2")]


@pytest.fixture(scope="module")
def refitted(prepared, tmp_path_factory) -> list[str]:
    """Two baselines whose test cases are ranked with the validation events counted too."""
    folder = tmp_path_factory.mktemp("refitted")
    places = {"data": prepared.parent, "artifacts": folder / "artifacts", "reports": folder}
    baselines(sequences=prepared, **places, config=EvaluateConfig(bootstrap=100, refit="valid"))
    return [str(folder / "markov"), str(folder / "popularity")]


@pytest.mark.parametrize("kind", ["evaluated", "refitted"])
def test_slices_are_those_of_the_evaluation(prepared, kind, request):
    runs = request.getfixturevalue(kind)
    result = compare(runs, sequences=prepared)

    reports = [json.loads((Path(run) / "metrics.json").read_text()) for run in runs]
    gains = result["others"][runs[1]]
    for split in ("valid", "test"):
        slices = {key for key in reports[0] if key.startswith(f"{split}/ndcg@10/") and "=" in key}
        known = {key for key in slices if not key.endswith(("/low", "/high"))}
        assert {f"{split}/ndcg@10/{name}" for name in gains[split]["slices"]} == known
        assert len(known) >= 3
        for name, figures in gains[split]["slices"].items():
            assert figures["first"] == pytest.approx(reports[0][f"{split}/ndcg@10/{name}"])
            assert figures["other"] == pytest.approx(reports[1][f"{split}/ndcg@10/{name}"])
            assert figures["cases"] == reports[0][f"{split}/cases/{name}"]
        for name in ("ndcg@10", "recall@10"):
            assert gains[split][name]["first"] == pytest.approx(reports[0][f"{split}/{name}"])
    assert result["split_sha256"] == sequences.load(prepared).card["split_sha256"]


def test_data_that_is_not_the_runs_is_refused(evaluated, tmp_path):
    other = prepare_rows(tmp_path, synthetic_rows(seed=5))

    with pytest.raises(ValueError, match=r"--sequences: .* is not the split that .*r1 was evaluated on"):
        compare(evaluated, sequences=other)
