"""TiSASRec against the paper's formulas, written with the (L, L, D) tensors that the model avoids."""

import math

import torch
from support import make_batch, make_model, prepare_rows

from seqrec.data import sequences
from seqrec.models.layers import attention_bias
from seqrec.models.tisasrec import IntervalAttention, TiSASRecOptions, intervals
from seqrec.serving.recommender import Recommender, Request
from seqrec.serving.torch_engine import TorchEngine, as_batch


def test_intervals_are_in_units_of_the_smallest_gap_so_far():
    """Padding is not a gap, and equal times are not a unit."""
    batch = make_batch([[3, 7, 2, 9], [3, 7], [1, 2, 3, 4]])
    times = torch.tensor([[-100.0, -70.0, -70.0, 0.0], [0.0, 0.0, -50.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    batch = batch._replace(times=times)

    got = intervals(batch, 8)

    # units: none, 30, 30, 30; the queries are rows
    assert got[0, 3].tolist() == [100 // 30, 70 // 30, 70 // 30, 0]
    assert got[0, 1].tolist()[:2] == [1, 0]
    assert got[0, 0, 0] == 0
    assert got[1, 3, 2:].tolist() == [1, 0]
    assert (got[2] == 0).all()
    assert intervals(batch, 2)[0, 3].tolist() == [2, 2, 2, 0]


def test_seconds_count_in_a_history_of_years(tmp_path):
    """float32 holds whole seconds up to half a year: what a batch holds must reach the first events of a history."""
    twenty_years = 631_152_000
    rows = [("u", f"i{n}", 1_000_000 + second) for n, second in enumerate((0, 1, 3, twenty_years))]
    data = sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1))

    batch = sequences.window(data, torch.tensor([0]), data.stop, 4)
    requests = [Request(history=["i0", "i1", "i2", "i3"], times=[second for _, _, second in rows])]
    model = make_model("tisasrec", num_items=data.num_items, num_users=1)
    item_ids = sequences.read_items(tmp_path / "sequences")
    recommender = Recommender(TorchEngine(model), item_ids, data.count.numpy(), ["u"], filter_seen=True)
    served = as_batch(recommender.histories(requests, [recommender.known(requests[0])]))

    for given in (batch, served):
        assert intervals(given, 99)[0, -2, -4:].tolist() == [3, 2, 0, 99]


def test_attention_equals_the_formulas_of_the_paper():
    options = TiSASRecOptions(d_model=6, heads=2, length=5, max_interval=7)
    attention = IntervalAttention(options).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    length, width = 4, 3
    x = torch.randn(1, length, 6).double()
    interval = torch.randint(0, 8, (1, length, length))
    bias = attention_bias(torch.tensor([[0, 4, 2, 9]]), causal=True).double()

    got = attention(x, x, bias, interval)[0]

    q, k, v = (part(x)[0] for part in (attention.to_query, attention.to_key, attention.to_value))
    mixed = torch.zeros(length, 6).double()
    for head in range(2):
        part = slice(head * width, (head + 1) * width)
        near_key, near_value = attention.position_key[head, -length:], attention.position_value[head, -length:]
        gap_key, gap_value = attention.interval_key[head][interval[0]], attention.interval_value[head][interval[0]]
        for i in range(1, length):
            seen = range(1, i + 1)
            scores = [q[i, part] @ (k[j, part] + near_key[j] + gap_key[i, j]) / math.sqrt(width) for j in seen]
            weights = torch.stack(scores).softmax(0)
            values = [v[j, part] + near_value[j] + gap_value[i, j] for j in seen]
            mixed[i, part] = sum(w * value for w, value in zip(weights, values, strict=True))
    torch.testing.assert_close(got[1:], attention.to_out(mixed)[1:])


def test_times_matter_and_later_times_do_not():
    model = make_model("tisasrec", max_interval=20).eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.interval_key)
        torch.nn.init.normal_(block.attention.interval_value)
    batch = make_batch([[3, 7, 2, 9, 4]])
    regular = batch._replace(times=torch.tensor([[-40.0, -30.0, -20.0, -10.0, 0.0]]))
    earlier = batch._replace(times=torch.tensor([[-80.0, -30.0, -20.0, -10.0, 0.0]]))
    later = batch._replace(times=torch.tensor([[-40.0, -30.0, -20.0, -10.0, -9.0]]))

    reference = model(regular)

    assert ((model(earlier) - reference)[0, 2:].abs().amax(-1) > 1e-4).all()  # from the second gap on, units differ
    torch.testing.assert_close(model(later)[:, :4], reference[:, :4])
    assert not torch.allclose(model(later)[:, 4], reference[:, 4])
