"""The contestants of benchmarks/peers.py get the same data, and none may recommend what a user has seen.

The benchmark of the GPU runs on a CPU in its quick form.
"""

import json
import warnings

import numpy as np
import pytest
import torch

from benchmarks import flops, gpu, ours, peer_data, peers, quality
from seqrec.data import sequences
from seqrec.evaluation import metrics, ranking
from seqrec.models.sasrec import SASRec

SETTINGS = {**peers.SETTINGS, "length": 15, "d_model": 8, "batch_size": 4}  # longer than some users' train events


def test_ours_and_the_peers_train_on_the_same_windows(prepared):
    data, histories = ours.load(prepared, 30), peer_data.read(prepared, 30)
    user = torch.arange(data.num_users)

    for stop, ours_stop in ((histories.train_stop, data.train_stop), (histories.valid_stop, data.valid_stop)):
        expected = sequences.window(data, user, ours_stop, 20).items
        np.testing.assert_array_equal(histories.windows(stop, 20), expected.numpy())
    assert histories.num_items == data.num_items

    model = ours.model_of(data, SETTINGS)
    figures = ours.train(model, data, SETTINGS, "fp32")
    ranked, lists = ours.rank(model, data, SETTINGS)

    assert figures["targets"] == (histories.windows(histories.train_stop, 16) > 0).sum() - 30  # the first is no target
    assert np.isfinite(figures["loss"])
    assert ranked["ranked"] == 30
    histories.check_unseen(lists.numpy())

    found = ranking.rank(ranking.model_scorer(model), data, sequences.cases(data, "test"), filter_seen=True)
    past = [data.items[first:stop].tolist() for first, stop in zip(data.start, data.valid_stop, strict=True)]
    new = [int(target) not in seen for target, seen in zip(data.items[data.valid_stop], past, strict=True)]
    assert 0 < sum(new) < len(new)  # a list has no seen item, not even the target
    assert histories.ndcg(lists.numpy()) == pytest.approx((metrics.ndcg(found.rank.numpy(), 10) * new).mean())


def test_a_training_ends_when_validation_has_not_improved_for_its_patience():
    progress = peer_data.UntilBest(patience=2)

    assert [progress.over(1.5, ndcg) for ndcg in (0.1, 0.3, 0.2, 0.4, 0.4, 0.3)] == [False] * 5 + [True]
    assert progress.epochs[-1] == (9.0, 0.3)


def test_the_time_to_quality_is_that_of_the_first_epoch_as_good_as_the_peers_best():
    runs = {
        "ours, sasrec": [quality.Epoch(30, 0.1), quality.Epoch(60, 0.2)],
        "replay, sasrec": [quality.Epoch(120, 0.1), quality.Epoch(240, 0.15), quality.Epoch(360, 0.12)],
        "rectools, sasrec": [quality.Epoch(600, 0.25)],
    }

    rows = [line.split(" | ") for line in quality.report(runs).splitlines()[2:]]

    assert rows[0] == ["| ours, sasrec", "0.2000", "2", "1.0 (4.0 x sooner)", "not reached |"]
    assert rows[1] == ["| replay, sasrec", "0.1500", "3", "4.0 (1.0 x sooner)", "not reached |"]


def test_flops_are_those_of_the_products_and_three_times_as_many_in_training():
    options = SASRec.Options(length=4, d_model=8, layers=1, heads=1)
    maps, scores = 6 * 8 * 8, 10 * 8  # weights of attention and point-wise network, and of the items
    products = [n * (maps + scores) + 2 * n * n * 8 for n in (1, 2, 4)]  # of a history of n events

    assert flops.training_flops(SASRec, 10, (1, 2, 4), options) == pytest.approx(3 * 2 * sum(products))


def test_every_part_of_the_gpu_benchmark_runs_on_a_cpu_and_one_that_fails_says_why(
    prepared, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(gpu.utilisation, "matmul_peak", lambda *_: 1e12)  # bf16 is emulated: half a minute each
    out = tmp_path / "rows.jsonl"
    common = ["--sequences", str(prepared), "--device", "cpu", "--quick", "--out", str(out)]
    common += ["--changes", "datasets.ml-1m.options.d_model=16"]

    gpu.main([*common, "--goals", "0.001", "0.999"])

    rows = {(row["part"], row["row"]): row for row in map(json.loads, out.read_text().splitlines())}
    failed = {row: figures["failed"] for (_, row), figures in rows.items() if "failed" in figures}
    assert all("No module named" in why for why in failed.values())
    assert {part for part, row in rows if row not in failed} == set(gpu.parts(quick=True))
    assert rows["training", "sasrec, 8, fp32"]["targets/s"] > 0
    goals = rows["time to quality", "sasrec"]
    assert goals["s to 0.001"] <= goals["s with validation"]
    assert goals["s to 0.999"] == "not reached"
    assert "| flash4rec, 8, bf16 | " in capsys.readouterr().out

    gpu.main([*common, "--minutes", "0", "--parts", "ranking"])

    assert "| sasrec | no time left |" in capsys.readouterr().out


def test_waits_for_the_gpu_are_counted_by_the_line_that_waits():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        warnings.warn("another warning", stacklevel=1)

    found = gpu.waits_of(caught, steps=2)

    assert (found["waits"], found["waits a step"]) == (4, 2.0)
    assert found["lines (waits)"].startswith("test_benchmarks.py:")
    assert found["lines (waits)"].endswith("(4)")
