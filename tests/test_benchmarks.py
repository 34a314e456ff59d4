import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from benchmarks import flops, losses, meter, ours, pctm_public, peer_data, peers
from seqrec.data import sequences
from seqrec.models.sasrec import SASRec

SETTINGS = {**peers.SETTINGS, "length": 8, "d_model": 8, "batch_size": 4}
OPTIONS = {name: SETTINGS[name] for name in peers.MODEL}


def test_needed_flops_by_hand():
    width, dim, items, layers = 5, 8, 30, 2
    linear = 6 * width * dim * dim * layers  # query, key, value, output, two of the point-wise network
    attention = 2 * width * width * dim * layers  # query x key, weight x value
    logits = width * dim * items
    forward_and_backward = 2 * 3  # a multiplication and an addition, once forward and twice backward

    counted = flops.training_flops(items, [width], SASRec.Options(**OPTIONS))

    assert counted == pytest.approx(forward_and_backward * (linear + attention + logits))


def test_needed_flops_of_ranking_by_hand():
    width, dim, items = 5, 8, 30
    first_layer = 6 * width * dim * dim + 2 * width * width * dim
    last_layer = 2 * width * dim * dim + 4 * dim * dim + 2 * width * dim  # keys and values of all, one query

    counted = flops.ranking_flops(items, [width, width], SASRec.Options(**OPTIONS))

    assert counted == pytest.approx(2 * 2 * (first_layer + last_layer + dim * items))


def test_markdown_table():
    assert (
        meter.markdown(("name", "a"), [("x", 1), ("y", "2 %")]) == "| name | a |\n| --- | --: |\n| x | 1 |\n| y | 2 % |"
    )


def test_cost_counts_the_work():
    def work():
        for _ in range(200):
            torch.randn(100, 100) @ torch.randn(100, 100)

    idle, busy = meter.cost_of(lambda: None), meter.cost_of(work)

    assert busy.cpu > idle.cpu
    assert busy.wall > idle.wall


PEAK = """
import torch
from benchmarks import meter
torch.ones(64 * 2**20)  # an earlier peak, which must not hide the next one
meter.reset_peak()
before = meter.peak_memory()
torch.ones(16 * 2**20)  # 64 MiB
print(meter.peak_memory() - before)
"""


def test_peak_memory_sees_what_is_freed():
    """In a process of its own: one that trained keeps freed blocks."""
    process = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)

    assert 60 < float(process.stdout) < 100


@pytest.mark.parametrize("name", [name for name in losses.CASES if name.startswith("ce")])
def test_every_cross_entropy_of_the_benchmark_is_the_same_loss(name):
    torch.manual_seed(0)
    query, item, target = torch.randn(16, 8), torch.randn(101, 8), torch.randint(1, 101, (16,))
    expected = F.cross_entropy(query @ item[1:].T, target - 1)

    tolerance = 2e-2 if "bf16" in name else 1e-5
    torch.testing.assert_close(losses.CASES[name](query, item, target), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", losses.CASES)
def test_every_case_is_measured(name, monkeypatch):
    monkeypatch.setattr(losses, "SECONDS", 0.0)

    figures = losses.measure(name, 100, 16, 8)

    assert figures["peak"] >= 0
    assert figures["wall"] > 0


def test_row_sparse_steps_leave_other_rows_alone():
    torch.manual_seed(0)
    query, item = torch.randn(4, 8, requires_grad=True), torch.randn(100_001, 8, requires_grad=True)
    losses.CASES["sampled_ce, row-sparse, and SparseAdam's step"](query, item, torch.tensor([1, 2, 3, 4])).backward()

    assert item.grad.is_sparse
    assert item.grad._nnz() <= 4 + losses.NEGATIVES


def test_peers_get_our_windows(prepared):
    data, histories = ours.load(prepared, 0), peer_data.read(prepared)
    user = torch.arange(data.num_users)

    for stop, ours_stop in ((histories.train_stop, data.train_stop), (histories.valid_stop, data.valid_stop)):
        expected = sequences.window(data, user, ours_stop, 20).items
        np.testing.assert_array_equal(histories.windows(stop, 20), expected.numpy())
    assert histories.num_items == data.num_items


def test_the_first_users_alone(prepared):
    data, histories = ours.load(prepared, 5), peer_data.read(prepared, 5)

    assert data.num_users == len(histories.start) == 5
    assert data.valid_stop.tolist() == histories.valid_stop.tolist()


def test_a_list_with_a_seen_item_is_refused():
    items, start, stop = np.array([1, 2, 3, 4, 5, 4]), np.array([0, 3]), np.array([2, 5])
    histories = peer_data.Histories(items, start, stop - 1, stop)
    histories.check_unseen(np.array([[3, 4, 5], [1, 2, 4]]))  # the second user's 4 repeats, but is the event to rank

    with pytest.raises(AssertionError, match="user 1"):
        histories.check_unseen(np.array([[3, 4, 5], [1, 2, 5]]))


def test_report_divides_ours_by_the_fastest_peer():
    def figures(seconds, cpu):
        return {
            "targets": 120,
            "ranked": 60,
            "train_wall": seconds,
            "rank_wall": seconds,
            "train_cpu": cpu,
            "rank_cpu": cpu,
        }

    ours_twice = [{**figures(s, 1.0), "evaluate_wall": 0.5, "evaluate_cpu": 0.5, "peak": 100} for s in (1.0, 3.0)]
    runs = {
        "ours": ours_twice,
        "replay": [{**figures(6.0, 4.0), "peak": 200}] * 2,
        "rectools": [{**figures(8.0, 2.0), "peak": 300}] * 2,
    }

    text = peers.report(runs, peak=800.0, needed={"target": 2.0, "user": 1.0}, threads=2)

    assert "| ours | 80 (40 - 120) | 120 (120 - 120) |" in text  # medians of 120 / 1 s and 120 / 3 s
    assert "20% | 100 |" in text  # 80 targets/s x 2 FLOP of 800 FLOP/s
    assert "| ours / fastest peer, fp32 | 4.00 (replay) | 2.00 (rectools) | 4.00 (replay) | 2.00 (rectools) |" in text
    assert "33% of the time" in text  # 0.5 / 1 and 0.5 / 3


def test_ours_trains_and_ranks(prepared):
    data, histories = ours.load(prepared, 30), peer_data.read(prepared, 30)
    settings = SETTINGS | {"length": 15}  # some users have more train events, some fewer
    model = ours.model_of(data, settings)

    figures = ours.train(model, data, settings, "fp32")
    ranked, lists = ours.rank(model, data, settings)

    assert figures["targets"] == (histories.windows(histories.train_stop, 16) > 0).sum() - 30  # the first is no target
    assert figures["train_wall"] > 0
    assert np.isfinite(figures["loss"])
    assert ranked["ranked"] == 30
    histories.check_unseen(lists.numpy())


def test_public_protocol_of_pctm_by_hand():
    """Ids 1 2 3 4; 2 follows 1 twice, 3 once; 4 is nobody's past, so it is cold."""
    users = [["1", "2", "3"], ["1", "2", "3"], ["2", "1", "3", "2"], ["3", "1", "4"]]

    dropped, missed = (pctm_public.figures(users, 1, "middle", cold) for cold in ("dropped", "missed"))

    assert pctm_public.as_sequences(users, 1)[1] == ["1", "2", "3"]
    assert dropped == pytest.approx((2 / 3, 2 / 3))  # 3 is the only item that the first two have not seen; 2 was seen
    assert missed == pytest.approx((2 / 4, 2 / 4))
