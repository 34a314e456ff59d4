"""`seqrec compare`: gains against hand arithmetic, p-values against enumeration, and what must not be compared."""

from __future__ import annotations

import itertools
import json
from math import log2
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support import prepare_rows, synthetic_rows

from seqrec.__main__ import main
from seqrec.artifacts import CASES_SCHEMA, write_json, write_table
from seqrec.config import EvaluateConfig, ModelConfig, PretrainConfig
from seqrec.data import sequences
from seqrec.evaluation import compare as module
from seqrec.evaluation import intervals, metrics
from seqrec.evaluation.compare import compare, sign_flip_p_value
from seqrec.stages.baselines import baselines
from seqrec.stages.evaluate import evaluate
from seqrec.stages.pretrain import pretrain

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
    rank = np.array(ranks)
    means = {"ndcg@10": metrics.ndcg(rank, 10).mean(), "recall@10": (rank <= 10).mean()}
    values = {f"{split}/{name}": float(value) for split in ("valid", "test") for name, value in means.items()}
    write_json(folder / "metrics.json", {"filter_seen": filter_seen} | values)
    return str(folder)


@pytest.fixture
def pair(tmp_path) -> list[str]:
    return [write_report(tmp_path / "one", ONE), write_report(tmp_path / "other", OTHER)]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_gains_by_hand(pair, split):
    gains = compare(pair)["others"][pair[1]][split]

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
    names = [write_report(tmp_path / name, rank, targets) for name, rank in zip("ab", ranks, strict=True)]

    found = compare(names, confidence=0.9, seed=7)["others"][names[1]]["valid"]["ndcg@10"]

    tables = [module._read(name).cases for name in names]
    expected = intervals.paired_gain(*tables, split="valid", confidence=0.9, seed=7)
    assert (found["gain"], found["low"], found["high"]) == expected


def test_the_cases_of_a_user_count_as_one_user(tmp_path):
    """Two users of many cases: the first's ranks are permuted, a sum of 0; the second's are 1 - 1/3 apart."""
    ranks = [1.0, 4.0, 2.0]  # the differences sum to -5.6e-17 in floats
    targets = [(1, position, 7) for position in range(4, 4 + len(ranks))] + [(2, 4, 7), (2, 5, 8)]
    names = [
        write_report(tmp_path / "a", [*ranks, 1.0, 11.0], targets),
        write_report(tmp_path / "b", [*ranks[1:], ranks[0], 11.0, 7.0], targets),
    ]

    gains = compare(names)["others"][names[1]]["test"]

    ndcg = gains["ndcg@10"]
    assert (gains["cases"], gains["users"]) == (len(targets), 2)
    assert (ndcg["users_better"], ndcg["users_equal"], ndcg["users_worse"]) == (1, 1, 0)
    assert ndcg["gain"] == pytest.approx((1 - 1 / 3) / len(targets))
    assert ndcg["p_value"] == 1.0


@pytest.mark.parametrize("seed", range(6))
def test_the_p_value_of_few_users_is_the_enumerated_one(seed):
    generator = np.random.default_rng(seed)
    total = generator.choice([-1.0, -0.5, 0.0, 0.25, 0.63, 1.0], size=2 + seed)

    flips = itertools.product((1, -1), repeat=len(total))
    sums = [abs(sum(sign * value for sign, value in zip(signs, total, strict=True))) for signs in flips]
    share = np.mean([value >= abs(sum(total)) - 1e-9 for value in sums])

    assert sign_flip_p_value(total, seed=0) == pytest.approx(share)


def test_the_p_value_of_many_users_is_close_to_the_exact_one():
    total = np.random.default_rng(1).normal(0.25, 1.0, size=module.EXACT_USERS + 2).round(1)
    total[total == 0] = 0.1
    signs = np.array(list(itertools.product((1, -1), repeat=len(total))))
    exact = (np.abs(signs @ total) >= abs(total.sum()) - 1e-9).mean()
    assert 0.02 < exact < 0.98

    assert sign_flip_p_value(total, seed=0) == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / module.FLIPS))
    assert sign_flip_p_value(total, seed=0) == sign_flip_p_value(total, seed=0)


def test_no_p_value_is_zero_and_no_difference_has_p_value_one():
    assert sign_flip_p_value(np.ones(500), seed=0, flips=999) == pytest.approx(1 / 1000)
    assert sign_flip_p_value(np.zeros(500), seed=0) == 1.0


def test_several_others_and_the_command_line(tmp_path, pair, capsys):
    third = write_report(tmp_path / "third", [1.0, 1.0, 1.0, 1.0])

    assert main(["compare", *pair, third, "--metrics", str(tmp_path / "out.json")]) == 0

    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["others"]) == [pair[1], third]
    assert result == compare([*pair, third])
    shown = capsys.readouterr().out
    assert "test ndcg@10" in shown
    assert "length=51+ (1)" in shown
    assert "1/1/2" in shown


def split_card(root: Path, digest: str) -> None:
    write_json(root / "data" / "sequences" / "split.json", {"split_sha256": digest})


def test_different_cases_are_refused(tmp_path, pair):
    other = write_report(tmp_path / "else", OTHER, [*TARGETS[:3], (4, 5, 2)])

    with pytest.raises(ValueError, match=r"one and .*else, valid: .*different cases: compare runs of one split only"):
        compare([pair[0], other])


def test_different_splits_are_refused_though_their_cases_are_the_same(tmp_path):
    names = [write_report(tmp_path / run / "reports" / "sasrec", ONE) for run in ("a", "b")]
    for run, digest in (("a", "1" * 64), ("b", "2" * 64)):
        split_card(tmp_path / run, digest)
    with pytest.raises(ValueError, match="evaluated on different splits, 111111111111 and 222222222222"):
        compare(names)

    split_card(tmp_path / "b", "1" * 64)
    assert compare(names)["split_sha256"] == "1" * 64


def test_seen_items_left_out_of_one_run_alone_are_refused(tmp_path, pair):
    write_report(tmp_path / "other", OTHER, filter_seen=0)

    with pytest.raises(ValueError, match=r"differ in filter_seen"):
        compare(pair)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["one"], "at least two"),
        (["one", "one"], "one is named twice"),
        (["one", "nowhere"], "nowhere holds no metrics.json"),
    ],
)
def test_what_cannot_be_compared_is_said(pair, tmp_path, monkeypatch, runs, message):
    monkeypatch.chdir(tmp_path)
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
    with pytest.raises(FileNotFoundError, match=r"no evaluated model gru4rec, but flash4rec, sasrec"):
        compare([a, f"{b}:gru4rec"])


@pytest.fixture(scope="module")
def evaluated(prepared, tmp_path_factory) -> list[str]:
    """Two models with different initial weights, evaluated by the stage."""
    folder = tmp_path_factory.mktemp("evaluated")
    for seed in (1, 2):
        initial, options = folder / f"i{seed}", {"d_model": 16, "length": 12}
        shared = {"model": "sasrec", "sequences": prepared}
        architecture, config = ModelConfig(architecture="sasrec", options=options), PretrainConfig(seed=seed)
        paths = {"initial": initial, "state": folder / "state"}
        pretrain(**shared, **paths, architecture=architecture, filter_seen=True, config=config)
        evaluate(**shared, checkpoint=initial, report=folder / f"r{seed}", config=EvaluateConfig(bootstrap=100))
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
