"""The baselines: what they score, against arithmetic and an independent solver."""

import json
import logging
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support import prepare_rows

from seqrec.artifacts import CASES, METRICS, read_json
from seqrec.config import EvaluateConfig
from seqrec.data import sequences
from seqrec.evaluation.leaderboard import BASELINES
from seqrec.stages import baselines as stage
from seqrec.stages.baselines import baselines, ease_scorer, popularity_scorer

CONFIG = EvaluateConfig(bootstrap=100)


def scores(scorer, data, user, stop):
    """The scores of every item for one user before the event `stop`, by item; entry 0 is padding."""
    blocks = scorer(data, torch.tensor([user]), torch.tensor([stop]))()
    return np.concatenate([[0.0], *(block[0].numpy() for _, block in blocks)])


@pytest.fixture
def data(tmp_path):
    """Four users whose train events are known: {a b c}, {a b a}, {b c d}, {a d c}; then an event each split."""
    histories = ["abcda", "abadc", "bcdab", "adcba"]
    rows = [(f"u{user}", item, 10 * n) for user, items in enumerate(histories) for n, item in enumerate(items)]
    return sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1))


def test_a_refit_also_ranks_cases_without_a_history(tmp_path):
    """Validation makes i9 the most popular item, and everybody in the test part is new."""
    rows = [(f"u{n % 20}", f"i{n % 10}", n) for n in range(200)]
    rows += [(f"v{n}", "i9", 200 + n) for n in range(60)] + [(f"w{n}", "i9", 260 + n) for n in range(60)]
    shares = {"valid_share": 60 / 320, "test_share": 60 / 320, "min_user_events": 1}
    folder = prepare_rows(tmp_path, rows, protocol="temporal", **shares)

    for refit, expected in (("none", 1 / 5.5), ("valid", 1.0)):  # ten items are equally popular at first
        baselines(sequences=folder, reports=tmp_path / refit, config=EvaluateConfig(bootstrap=100, refit=refit))
        for name in BASELINES:
            values = read_json(tmp_path / refit / name / METRICS)
            assert values["test/mrr"] == pytest.approx(expected), name


def test_a_split_without_cases_names_the_settings(tmp_path):
    rows = [(f"u{user}", f"i{(user + n) % 12}", 100 * user + n) for user in range(20) for n in range(8)]
    folder = prepare_rows(tmp_path, rows, protocol="RATIO-full")
    with pytest.raises(ValueError, match=r"no valid cases: check prepare\.protocol, prepare\.valid_share"):
        baselines(sequences=folder, reports=tmp_path, config=CONFIG)


def user_items(data):
    """The binary user-item matrix of train, with loops."""
    matrix = np.zeros((data.num_users, data.num_items + 1))
    for user in range(data.num_users):
        for event in range(data.start[user], data.train_stop[user]):
            matrix[user, data.items[event]] = 1
    return matrix


def test_popularity_is_the_number_of_train_events(data):
    known = [0, *(int((user_items(data)[:, item]).sum()) for item in range(1, 5))]
    repeated = int(data.items[data.start[1]])  # the second user has her first item twice
    known[repeated] += 1

    assert scores(popularity_scorer(data), data, 0, int(data.stop[0]) - 1).tolist() == known


def test_ease_solves_a_ridge_regression_of_each_item_on_the_others(data, monkeypatch):
    monkeypatch.setattr(stage, "RIDGE", 0.7)
    matrix = user_items(data)
    weights = np.zeros((5, 5))
    for item in range(1, 5):
        others = [i for i in range(1, 5) if i != item]
        x = matrix[:, others]
        weights[others, item] = np.linalg.solve(x.T @ x + 0.7 * np.eye(3), x.T @ matrix[:, item])

    scorer = ease_scorer(data)

    for user in range(4):
        for stop in (data.train_stop[user], data.valid_stop[user]):  # at test the past holds the validation item
            past = np.zeros(5)
            past[data.items[data.start[user] : stop].numpy()] = 1
            np.testing.assert_allclose(scores(scorer, data, user, int(stop)), past @ weights, atol=1e-6)


def test_every_baseline_gets_its_report(prepared, tmp_path):
    values = baselines(sequences=prepared, reports=tmp_path, config=CONFIG)

    for name in BASELINES:
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        assert metrics["test/ndcg@10"] == values[f"{name}/test/ndcg@10"]
    assert values["markov/test/ndcg@10"] > 0.5  # four of five next items follow from the last one
    assert values["ease/test/ndcg@10"] > 2 * values["popularity/test/ndcg@10"]


def test_ease_is_left_out_of_a_large_catalogue(prepared, tmp_path, caplog):
    (tmp_path / "ease").mkdir()
    (tmp_path / "ease" / "metrics.json").write_text("{}")  # of other data

    with caplog.at_level(logging.WARNING):
        values = baselines(sequences=prepared, reports=tmp_path, config=CONFIG, ease_items=39)  # the log has 40

    assert "ease is left out: 40 items" in caplog.text
    assert set(values) == {f"{name}/test/ndcg@10" for name in BASELINES if name != "ease"}
    assert list((tmp_path / "ease").iterdir()) == []


def test_a_refit_adds_the_validation_events_to_the_counts_of_the_test_cases(prepared, tmp_path):
    data = sequences.load(prepared)

    baselines(sequences=prepared, reports=tmp_path / "none", config=CONFIG)
    baselines(sequences=prepared, reports=tmp_path / "valid", config=replace(CONFIG, refit="valid"))

    for name in ("popularity", "markov", "ease", "pctm", "seqrules"):
        none, valid = (read_json(tmp_path / kind / name / METRICS) for kind in ("none", "valid"))
        assert none["valid/mrr"] == valid["valid/mrr"], name
        assert none["test/mrr"] != valid["test/mrr"], name
    count = np.bincount(
        [int(data.items[i]) for u in range(data.num_users) for i in range(data.start[u], data.valid_stop[u])]
    )
    cases = pq.read_table(tmp_path / "valid/popularity" / CASES).to_pandas().query("split == 'test'")
    for user, target, rank in zip(cases["user"], cases["target"], cases["rank"], strict=True):
        past = set(data.items[data.start[user - 1] : data.valid_stop[user - 1]].tolist()) - {target}
        rivals = np.array([count[item] for item in range(1, len(count)) if item not in past and item != target])
        assert rank == 1 + (rivals > count[target]).sum() + (rivals == count[target]).sum() / 2
