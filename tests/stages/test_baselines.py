"""The baselines: what they score, against arithmetic and an independent solver, and that they are models like any."""

import logging
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support import FILTERED, prepare_rows

from seqrec.artifacts import CASES, METRICS, RECOMMENDATIONS, REFITTED, read_json
from seqrec.commands import recommend
from seqrec.config import EvaluateConfig
from seqrec.counts import ease, search, term
from seqrec.counts.ease import ease_weights
from seqrec.counts.search import Tables
from seqrec.data import sequences
from seqrec.serving import approximate_search, onnx_graph
from seqrec.serving.onnx_engine import OnnxEngine
from seqrec.serving.recommender import Recommender, Request
from seqrec.serving.rules import Attribute, Attributes
from seqrec.stages import baselines as stage
from seqrec.stages.baselines import write
from seqrec.stages.evaluate import evaluate
from seqrec.training.checkpoint import catalogue_files, load_checkpoint

CONFIG = EvaluateConfig(bootstrap=100)


def baselines(folder, out, config=CONFIG, **more):
    """Run the stage on the prepared dataset in `folder`."""
    return stage.baselines(
        sequences=folder,
        data=folder.parent,
        artifacts=out / "artifacts",
        reports=out / "reports",
        config=config,
        **more,
    )


@pytest.fixture(scope="module")
def written(prepared, tmp_path_factory):
    """Where the stage has written its models and reports, and its figures."""
    out = tmp_path_factory.mktemp("baselines")
    return out, baselines(prepared, out)


@pytest.fixture
def tables(tmp_path):
    """Four users whose train events are known: {a b c}, {a b a}, {b c d}, {a d c}; then an event each split."""
    histories = ["abcda", "abadc", "bcdab", "adcba"]
    rows = [(f"u{user}", item, 10 * n) for user, items in enumerate(histories) for n, item in enumerate(items)]
    return prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1)


def test_a_refit_also_ranks_cases_without_a_history(tmp_path):
    """Validation makes i9 the most popular item, and everybody in the test part is new."""
    rows = [(f"u{n % 20}", f"i{n % 10}", n) for n in range(200)]
    rows += [(f"v{n}", "i9", 200 + n) for n in range(60)] + [(f"w{n}", "i9", 260 + n) for n in range(60)]
    shares = {"valid_share": 60 / 320, "test_share": 60 / 320, "min_user_events": 1}
    folder = prepare_rows(tmp_path, rows, protocol="temporal", **shares)

    for refit, expected in (("none", 1 / 5.5), ("valid", 1.0)):  # ten items are equally popular at first
        baselines(folder, tmp_path / refit, EvaluateConfig(bootstrap=100, refit=refit))
        for name in FILTERED:
            values = read_json(tmp_path / refit / "reports" / name / METRICS)
            assert values["test/mrr"] == pytest.approx(expected), name


def test_a_split_without_cases_names_the_settings(tmp_path):
    rows = [(f"u{user}", f"i{(user + n) % 12}", 100 * user + n) for user in range(20) for n in range(8)]
    folder = prepare_rows(tmp_path, rows, protocol="RATIO-full")
    with pytest.raises(ValueError, match=r"valid split has no cases: check prepare\.protocol, prepare\.valid_share"):
        baselines(folder, tmp_path)


def test_without_cases_because_later_items_are_new_the_error_names_the_filter(tmp_path):
    rows = [(f"u{user}", f"i{10 * day + user % 2}", 1_000 * day + user) for user in range(12) for day in range(10)]
    folder = prepare_rows(tmp_path, rows, protocol="temporal", min_user_events=2)
    with pytest.raises(ValueError, match=r"valid split has no cases.*prepare\.filter_on: all"):
        baselines(folder, tmp_path)


def user_items(data):
    """The binary user-item matrix of train, with loops."""
    matrix = np.zeros((data.num_users, data.num_items + 1))
    for user in range(data.num_users):
        for event in range(data.start[user], data.train_stop[user]):
            matrix[user, data.items[event]] = 1
    return matrix


def scores_of(name, tables, folder, history):
    """The scores of items 1, 2, ... after a history of item numbers, as the service gives them."""
    data = sequences.load(tables)
    write(name, Tables(data), tables, folder, catalogue_files(tables), filter_seen=False)
    recommender = Recommender.load(folder)
    answer = recommender.recommend([recommender.item_ids[item - 1] for item in history], k=data.num_items)
    assert answer.source == name
    score = dict(zip(answer.items, answer.scores, strict=True))
    return [score[item_id] for item_id in recommender.item_ids]


def test_the_stages_of_a_process_count_once(tables, tmp_path, monkeypatch):
    baselines(tables, tmp_path, names=("pctm",))
    monkeypatch.setattr(search, "count_all", None)
    monkeypatch.setattr(search, "counted", None)

    saved = tmp_path / "artifacts" / "pctm" / "finetuned"
    evaluate(model="pctm", sequences=tables, checkpoint=saved, report=tmp_path / "report", config=CONFIG)
    baselines(tables, tmp_path, names=("seqrules",))
    other = prepare_rows(tmp_path / "other", [(f"u{n % 9}", f"i{n % 4}", n) for n in range(90)])
    with pytest.raises(TypeError):
        baselines(other, tmp_path, names=("seqrules",))


def test_a_log_whose_ranking_takes_long_names_the_setting(prepared, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(stage, "SLOW", 60 * 40 - 1)

    baselines(prepared, tmp_path, names=())

    assert "60 cases x 40 items" in caplog.text
    assert "prepare.max_cases" in caplog.text


def test_popularity_is_the_number_of_train_events(tables, tmp_path):
    data = sequences.load(tables)
    known = user_items(data)[:, 1:].sum(0)
    known[int(data.items[data.start[1]]) - 1] += 1  # the second user has her first item twice

    assert scores_of("popularity", tables, tmp_path / "saved", [1]) == known.tolist()


def test_ease_solves_a_ridge_regression_of_each_item_on_the_others(tables, tmp_path, monkeypatch):
    matrix = user_items(sequences.load(tables))
    weights = np.zeros((5, 5))
    for item in range(1, 5):
        others = [i for i in range(1, 5) if i != item]
        x = matrix[:, others]
        weights[others, item] = np.linalg.solve(x.T @ x + 0.7 * np.eye(3), x.T @ matrix[:, item])

    monkeypatch.setattr(ease, "ROWS", 2)  # of five
    np.testing.assert_allclose(ease_weights(torch.from_numpy(matrix).to_sparse(), 0.7), weights, atol=1e-6)

    computed = []
    monkeypatch.setattr(ease, "ease_weights", lambda x: computed.append(x) or torch.from_numpy(weights).float())
    monkeypatch.setattr(ease, "_LAST", {})
    for history in ([1], [2, 3], [4, 1, 4]):
        found = scores_of("ease", tables, tmp_path / "saved", history)
        decay = load_checkpoint(tmp_path / "saved").card["counts"]["rho"]
        votes = [decay**age * weights[item] for age, item in enumerate(reversed(history))]
        np.testing.assert_allclose(found, sum(votes)[1:], atol=1e-6)
    assert len(computed) == 1
    np.testing.assert_array_equal(computed[0].to_dense(), matrix)


@pytest.mark.parametrize("filter_seen", [False, True])
def test_repeats_are_a_users_own_items_by_age_where_they_are_candidates(tables, tmp_path, filter_seen):
    values = baselines(tables, tmp_path, filter_seen=filter_seen, names=("repeats",))

    assert (values == {}) is filter_seen
    if filter_seen:
        return
    weight = {"inverse": lambda age: 1 / age, "root": lambda age: age**-0.5, "square": lambda age: age**-2.0}
    found = scores_of("repeats", tables, tmp_path / "saved", [1, 3, 1, 2])
    decay = load_checkpoint(tmp_path / "saved").card["counts"]["decay"]
    of = weight.get(decay, lambda age: float(decay) ** (age - 1))
    events = np.array([4, 3, 3, 2])  # in train, of a, b, c and d; ranks what is not the user's own
    known = 1e-4 * np.log((events + 1) / (events.sum() + 4))
    np.testing.assert_allclose(found, known + np.array([of(2) + of(4), of(1), of(3), 0]), atol=1e-6)


def test_markov_adds_tempered_counts_by_age(tables, tmp_path):
    """Against loops over the training events: weights 1 / distance, over the root of a row's sum, by 1 / age."""
    data = sequences.load(tables)
    follows = np.zeros((5, 5))
    for user in range(data.num_users):
        items = data.items[data.start[user] : data.train_stop[user]].tolist()
        for place, item in enumerate(items):
            for distance, later in enumerate(items[place + 1 :], start=1):
                follows[item, later] += 1 / distance
    tempered = follows / np.sqrt(np.maximum(follows.sum(1, keepdims=True), 1e-12))

    found = scores_of("markov", tables, tmp_path / "saved", [3, 1, 2])

    expected = (tempered[2] + tempered[1] / 2 + tempered[3] / 3) / (1 + 1 / 2 + 1 / 3)
    np.testing.assert_allclose(found, expected[1:], atol=1e-6)


def test_every_baseline_learns_its_pattern(written):
    _, values = written

    assert set(values) == {f"{name}/test/ndcg@10" for name in FILTERED}
    assert values["markov/test/ndcg@10"] > 0.5  # four of five next items follow from the last one
    assert values["ease/test/ndcg@10"] > 2 * values["popularity/test/ndcg@10"]


# Markov and seqrules are pctm with other values.
@pytest.mark.parametrize("name", ["popularity", "ease", "pctm", "repeats"])
def test_service_graph_search_and_evaluation_of_a_baseline_agree(prepared, written, tmp_path, monkeypatch, name):
    monkeypatch.setattr(term, "ease_table", None)  # its weights are stored: it takes minutes for a large catalogue
    out, values = written
    filter_seen = name != "repeats"
    if not filter_seen:
        out, values = tmp_path, baselines(prepared, tmp_path, filter_seen=False, names=("repeats",))
    data, folder = sequences.load(prepared), out / "artifacts" / name / "finetuned"
    onnx_graph.export(saved=folder, output=tmp_path, k=20)
    report = tmp_path / "report"
    evaluate(model=name, sequences=prepared, checkpoint=folder, report=report, config=CONFIG, filter_seen=filter_seen)
    lists = pq.read_table(report / RECOMMENDATIONS).to_pandas().groupby("user")
    recommenders = [Recommender.load(folder), approximate_search.load(folder, 64)]
    engine = OnnxEngine(tmp_path, read_json(tmp_path / "model.onnx.json"))
    vars(engine)["weights"] = recommenders[0].engine
    graph = Recommender.of(load_checkpoint(folder), engine)

    assert read_json(report / METRICS)["test/ndcg@10"] == values[f"{name}/test/ndcg@10"]
    for recommender in (*recommenders, graph):
        for user in range(0, data.num_users, 10):
            *past, target = data.items[data.start[user] : data.stop[user]].tolist()
            if target in past:  # evaluation never hides the target
                continue
            request = Request(history=[recommender.item_ids[item - 1] for item in past], k=10)
            (answer,) = recommender.answer([request])
            expected = lists.get_group(user + 1).head(10)
            assert answer.scores == pytest.approx(expected["score"].tolist(), abs=1e-5)
            assert answer.source == name
            drops = recommender.explain(request, answer.items[0])
            assert any(drops) == (name != "popularity")


@pytest.mark.parametrize("refitted", [False, True])
def test_without_counts_batch_service_and_similar_items_are_the_popular_ones(tmp_path, refitted):
    """Nothing follows z, and x and y only follow each other."""
    rows = [(f"u{user}", item, 10 * n) for user in range(9) for n, item in enumerate("abcd"[user % 2 :] + "abca")]
    rows += [("one", "z", 5), *[("two", item, 5 + n) for n, item in enumerate("xy")]]
    rows += [(f"v{user}", item, 7 + n) for user in range(3) for n, item in enumerate("xyxy")]
    folder = prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1)
    baselines(folder, tmp_path, replace(CONFIG, refit="valid" if refitted else "none"), names=("markov",))
    saved = tmp_path / "artifacts/markov/finetuned" / (REFITTED if refitted else "")
    recommender = Recommender.load(saved)
    recommender.attributes = Attributes(kind=Attribute(["x" if i == "z" else "y" for i in recommender.item_ids]))

    recommend.score(sequences=folder, saved=saved, output=tmp_path / "best.parquet", k=3)

    table = pq.read_table(tmp_path / "best.parquet").to_pandas().set_index("user_id")
    for user, history in {"one": ["z"], "two": ["x", "y"]}.items():
        popular = [item for item in recommender.popular(7).items if item not in history]
        for k in (1, 3):
            assert recommender.recommend(history, k).items == popular[:k]
        answer = recommender.recommend(history, 3)
        assert answer.source == "popularity"
        assert (table.loc[user, "items"].tolist(), table.loc[user, "scores"].tolist()) == (answer.items, answer.scores)
        assert recommender.recommend(history, 3, boost={"kind": {"y": 2}}).items == popular[:3]
    assert recommender.similar("z", 3).items == recommender.recommend(["z"], 3).items
    assert recommender.recommend(["a"], allow=["no such"]).source == "markov"


def test_ease_is_left_out_of_a_large_catalogue(prepared, tmp_path, caplog):
    for folder in (tmp_path / "reports/ease", tmp_path / "artifacts/ease/finetuned"):
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text("{}")  # of other data

    with caplog.at_level(logging.WARNING):
        values = baselines(prepared, tmp_path, ease_items=39, names=("popularity", "ease"))  # the log has 40

    assert "ease is left out: 40 items" in caplog.text
    assert set(values) == {"popularity/test/ndcg@10"}
    for folder in (tmp_path / "reports/ease", tmp_path / "artifacts/ease/finetuned"):
        (reason,) = folder.iterdir()
        assert reason.read_text() in caplog.text


def test_a_refit_adds_the_validation_events_to_the_counts_of_the_test_cases(prepared, written, tmp_path):
    data = sequences.load(prepared)

    baselines(prepared, tmp_path, replace(CONFIG, refit="valid"))

    for name in FILTERED:
        none, valid = (read_json(out / "reports" / name / METRICS) for out in (written[0], tmp_path))
        assert none["valid/mrr"] == valid["valid/mrr"], name
        assert none["test/mrr"] != valid["test/mrr"], name
        folder = tmp_path / "artifacts" / name / "finetuned"
        before, after = (load_checkpoint(place).card["counts"] for place in (folder, folder / REFITTED))
        outcome = ("pairs", "sha256")
        assert before | dict.fromkeys(outcome) == after | dict.fromkeys(outcome)
    count = np.bincount(
        [int(data.items[i]) for u in range(data.num_users) for i in range(data.start[u], data.valid_stop[u])]
    )
    cases = pq.read_table(tmp_path / "reports/popularity" / CASES).to_pandas().query("split == 'test'")
    for user, target, rank in zip(cases["user"], cases["target"], cases["rank"], strict=True):
        past = set(data.items[data.start[user - 1] : data.valid_stop[user - 1]].tolist()) - {target}
        rivals = np.array([count[item] for item in range(1, len(count)) if item not in past and item != target])
        assert rank == 1 + (rivals > count[target]).sum() + (rivals == count[target]).sum() / 2
