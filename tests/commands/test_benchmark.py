"""`seqrec benchmark`: rows and seeds, what is done again, and the figures of the page."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from support import synthetic_rows, write_log

from seqrec.artifacts import CASES, ITEMS, METRICS, read_json, write_json, write_table
from seqrec.commands import benchmark as bench
from seqrec.config import ConfigError, from_dict
from seqrec.pipeline import BASELINES
from seqrec.stages import baselines
from seqrec.stages.evaluate import evaluate

CONFIG = {
    "dataset": "tiny",
    "datasets": {"tiny": {}, "other": {}, "few": {"finetune": {"user_share": 0.5, "counts": "none"}}},
    "leaderboard": ["sasrec", "gru4rec"],
    "finetune": {"epochs": 2, "batch_size": 16, "learning_rate": 0.01, "warmup_steps": 2, "counts": {"alpha": 0.5}},
    "evaluate": {"bootstrap": 100},
    "models": {
        "sasrec": {"options": {"d_model": 16, "heads": 1, "layers": 1, "length": 12}},
        "gru4rec": {"options": {"d_model": 16, "d_state": 16, "layers": 1, "length": 12}},
    },
}


@pytest.fixture(scope="module")
def out(prepared, tmp_path_factory) -> Path:
    """A benchmark of two models and two seeds."""
    folder = tmp_path_factory.mktemp("benchmark")
    run(folder, prepared, seeds="1,2")
    return folder / "out"


def run(folder: Path, prepared: Path, config=CONFIG, **flags):
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return bench.benchmark(config_file=folder / "config.yaml", out=folder / "out", data=prepared.parent, **flags)


def rows_of(out: Path) -> dict[str, dict]:
    return {row["model"]: row for row in read_json(out / "benchmark.json")["rows"]}


def trained(out: Path) -> dict[str, int]:
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("best.safetensors")}


def ndcg(report: Path) -> np.ndarray:
    """NDCG@10 of the test cases by user, computed anew."""
    cases = pq.read_table(report / CASES).to_pandas()
    cases = cases[cases.split == "test"].sort_values("user")
    return np.where(cases["rank"] <= 10, 1 / np.log2(cases["rank"] + 1), 0.0)


def test_figures_are_means_over_the_seeds(out):
    for model in CONFIG["leaderboard"]:
        row = rows_of(out)[model]
        found = [read_json(out / f"seed-{seed}/reports/{model}" / METRICS) for seed in (1, 2)]
        assert row["seeds"] == [1, 2]
        assert found[0]["test/ndcg@10"] != found[1]["test/ndcg@10"]  # the seed reaches the training
        assert row["ndcg"] == pytest.approx(np.mean([values["test/ndcg@10"] for values in found]))
        assert row["spread"] == pytest.approx(abs(found[0]["test/ndcg@10"] - found[1]["test/ndcg@10"]) / np.sqrt(2))
        assert row["new"] is None  # no target is new
        assert 50 < row["train_peak_mb"] < 100_000
        assert row["valid"] == pytest.approx(np.mean([values["valid/ndcg@10"] for values in found]))


def test_gains_are_paired_over_the_best_baseline_on_validation(out):
    content = read_json(out / "benchmark.json")
    baselines = {name: row for name, row in rows_of(out).items() if row["baseline"]}
    assert content["base"] == max(baselines, key=lambda name: baselines[name]["valid"])

    ours = np.mean([ndcg(out / f"seed-{seed}/reports/sasrec") for seed in (1, 2)], axis=0)
    gain = rows_of(out)["sasrec"]["gain"]
    assert gain[0] == pytest.approx((ours - ndcg(out / "reports" / content["base"])).mean())
    assert gain[1] < gain[0] < gain[2]
    assert rows_of(out)[content["base"]]["gain"] is None


def test_another_model_may_be_the_base_and_is_compared_seed_by_seed(out, prepared):
    assert bench.write_page(bench.load(out.parent / "config.yaml"), prepared, out, "gru4rec")
    content, rows = read_json(out / "benchmark.json"), rows_of(out)

    assert content["base"] == "gru4rec"
    assert rows["gru4rec"]["gain"] is None
    ours, theirs = ([ndcg(out / f"seed-{seed}/reports/{name}") for seed in (1, 2)] for name in ("sasrec", "gru4rec"))
    difference = np.stack(ours) - np.stack(theirs)
    mean, low, high = rows["sasrec"]["gain"]
    assert mean == pytest.approx(difference.mean())
    assert low <= difference.mean(1).min()  # other seeds may be twice the same one
    assert high >= difference.mean(1).max()
    baseline = rows["markov"]["gain"]
    assert bench.write_page(bench.load(out.parent / "config.yaml"), prepared, out, "markov")
    mean, low, high = rows_of(out)["gru4rec"]["gain"]
    assert baseline == pytest.approx([-mean, -high, -low])  # other seeds of the base count as well


def test_a_base_that_is_not_finished_is_named_and_a_baseline_takes_its_place(out, prepared, tmp_path, caplog):
    shutil.copytree(out, tmp_path / "out")
    shutil.rmtree(tmp_path / "out/seed-1/reports/gru4rec")
    shutil.rmtree(tmp_path / "out/seed-2/reports/gru4rec")

    bench.write_page(from_dict(CONFIG), prepared, tmp_path / "out", "gru4rec")

    assert "--base: gru4rec is not finished with these settings and this code" in caplog.text
    assert read_json(tmp_path / "out/benchmark.json")["base"] in BASELINES
    assert rows_of(tmp_path / "out")["sasrec"]["gain"] is not None


def test_models_are_also_measured_without_their_counts(out, prepared, tmp_path):
    checkpoint, config = out / "seed-1/artifacts/sasrec/finetuned", bench.load(out.parent / "config.yaml")
    shared = {"model": "sasrec", "sequences": prepared, "checkpoint": checkpoint, "config": config.section("evaluate")}

    alone = evaluate(**shared, report=tmp_path, without_counts=True)

    assert alone["counts/alpha"] == 0.0
    assert alone["test/ndcg@10"] == read_json(out / "seed-1/alone/sasrec" / METRICS)["test/ndcg@10"]
    assert alone["test/ndcg@10"] != read_json(out / "seed-1/reports/sasrec" / METRICS)["test/ndcg@10"]


def test_the_page_shows_how_new_items_are_ranked(out, prepared):
    for seed, value in ((1, 0.25), (2, 0.5)):
        path = out / f"seed-{seed}/reports/sasrec" / METRICS
        write_json(path, read_json(path) | {bench.NEW: value})
    bench.write_page(bench.load(out.parent / "config.yaml"), prepared, out)

    assert rows_of(out)["sasrec"]["new"] == 0.375
    assert "| 0.3750 |" in (out / bench.PAGE).read_text()


def test_only_what_is_missing_or_changed_is_trained(out, prepared):
    before = trained(out)
    run(out.parent, prepared, seeds="1,2")
    assert trained(out) == before

    changed = CONFIG | {"models": CONFIG["models"] | {"gru4rec": {"options": {"d_model": 8, "length": 12}}}}
    run(out.parent, prepared, changed, seeds="1,3", only="gru4rec")
    after = trained(out)
    assert {path for path in before if after[path] != before[path]} == {
        f"seed-1/artifacts/gru4rec/{phase}/best.safetensors" for phase in ("initial", "finetuned")
    }
    assert {path.split("/")[1:3] == ["artifacts", "gru4rec"] for path in after.keys() - before.keys()} == {True}


def test_figures_of_other_data_settings_or_code_are_not_shown(out, prepared, tmp_path, monkeypatch):
    shutil.copytree(out, tmp_path / "out")
    shutil.copytree(out / "seed-1", tmp_path / "out/seed-1.old2")  # a copy of somebody's
    data, params = shutil.copytree(prepared.parent, tmp_path / "data"), from_dict(CONFIG)
    shutil.copytree(prepared.parent, data / "sources/other")

    def shown(params):
        bench.write_page(params, data / "sequences", tmp_path / "out")
        return [name for name in CONFIG["leaderboard"] if name in rows_of(tmp_path / "out")]

    assert shown(params) == CONFIG["leaderboard"]
    assert shown(params.with_overrides({"filter_seen": False})) == []
    assert shown(params.with_overrides({"sources": ["other"]})) == []
    items = pq.read_table(data / ITEMS)
    write_table(data / ITEMS, items.set_column(1, "title", items["item_id"]))
    assert shown(params) == []
    write_table(data / ITEMS, items)
    assert shown(params) == CONFIG["leaderboard"]
    monkeypatch.setattr(bench, "fingerprint", lambda module, model, *_: f"edited {module} with {model}")
    assert shown(params) == []


def test_baselines_that_an_interruption_has_left_are_computed_again(out, prepared, tmp_path, monkeypatch):
    shutil.copytree(out, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(baselines, "evaluate", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, prepared, CONFIG | {"filter_seen": False}, seeds="1")
    run(tmp_path, prepared, seeds="1")

    assert rows_of(tmp_path / "out").keys() == rows_of(out).keys()


def test_data_are_prepared_anew_when_their_settings_change(tmp_path):
    """The log has no items, so a model that reads their attributes is left out."""
    source = {"source": "csv", "interactions": str(write_log(tmp_path / "log.csv", synthetic_rows()))}
    for users in (60, 30):
        dataset = {"ingest": source, "validate": {"min_date": "1970-01-01"}, "prepare": {"sample_users": users}}
        models = {"fdsa": {}, "gru4rec": CONFIG["models"]["gru4rec"]}
        config = CONFIG | {"datasets": {"tiny": dataset}, "leaderboard": list(models), "models": models}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        bench.benchmark(config_file=tmp_path / "config.yaml", out=tmp_path / "out")

        for report in ("reports/pctm", "seed-42/reports/gru4rec"):
            assert len(ndcg(tmp_path / "out" / report)) == users


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        ({"seeds": "1,two"}, "--seeds: 'two'"),
        ({"only": "sasrec,nobody"}, "--only: nobody"),
        ({"base": "nobody"}, "--base: nobody is neither a baseline nor"),
        ({"dataset": "few"}, "finetune.user_share: must be 1, because the baselines read every user"),
    ],
)
def test_wrong_flags_are_named(flags, wrong, prepared, tmp_path):
    with pytest.raises(ConfigError, match=wrong):
        run(tmp_path, prepared, **flags)


def test_corrected_p_values_are_those_of_holms_procedure():
    found = bench.holm([0.01, 0.04, 0.03, 0.005, 0.5])

    # from the smallest: 5 * 0.005, 4 * 0.01, 3 * 0.03, then 2 * 0.04, which may not be below the one before, and 0.5
    assert found == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.5])
