"""Counts of what follows what, against a double loop over users and events."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import counts_by_loop

from seqrec.counts import table
from seqrec.data import ties

WEIGHTS = (1.0, 0.5, 0.25)


def square(found):
    size = len(found.offsets) - 1
    dense = np.zeros((size, size))
    row = np.repeat(np.arange(size), found.offsets.diff().numpy())
    dense[row, found.targets.numpy()] = found.values.numpy()
    return dense


def test_counts_are_those_of_a_double_loop(data):
    np.testing.assert_allclose(square(table.count(data, WEIGHTS)), counts_by_loop(data, WEIGHTS), rtol=1e-6)


def test_events_of_one_time_are_counted_in_both_directions_if_their_order_is_random(data):
    generator = torch.Generator().manual_seed(0)
    tied = replace(data, times=data.times // 4_000)
    assert torch.equal(table.count(tied, WEIGHTS).values, table.count(data, WEIGHTS).values)  # users agree on it
    tied = ties.shuffled(tied, *ties.groups(tied), generator)
    turned = tied.items.clone()
    for start, stop in zip(tied.start.tolist(), tied.train_stop.tolist(), strict=True):
        for time in tied.times[start:stop].unique().tolist():
            places = start + (tied.times[start:stop] == time).nonzero().flatten()
            turned[places] = tied.items[places.flip(0)]

    found = square(table.count(tied, WEIGHTS))

    both = counts_by_loop(tied, WEIGHTS), counts_by_loop(replace(tied, items=turned), WEIGHTS)
    assert not np.array_equal(*both)
    np.testing.assert_allclose(found, sum(both) / 2, rtol=1e-6)


def test_pairs_of_events_at_different_times_count_less(data):
    tied = replace(data, times=data.times // 4_000)

    found = square(table.count(tied, WEIGHTS, across=0.3))

    np.testing.assert_allclose(found, counts_by_loop(tied, WEIGHTS, 0.3), rtol=1e-6)
    assert not np.allclose(found, counts_by_loop(tied, WEIGHTS))


def test_tables_of_several_kernels_are_those_of_each_alone(data):
    data = replace(data, times=data.times // 4_000)  # ordered ties
    kernels = (WEIGHTS, WEIGHTS[:1], (0.5, 0.3, 0.2, 0.1, 0.1))

    for weights, found in zip(kernels, table.count_all(data, kernels, limit=5, across=0.3), strict=True):
        alone = table.count(data, weights, limit=5, across=0.3)
        assert all(map(torch.equal, vars(found).values(), vars(alone).values()))
        np.testing.assert_allclose(
            square(table.count_all(data, [weights, WEIGHTS])[0]), counts_by_loop(data, weights), rtol=1e-6
        )


@pytest.mark.parametrize("pairs", [1, 100, 1 << 24])
def test_the_result_does_not_depend_on_what_is_in_memory_at_once(data, monkeypatch, pairs):
    whole = table.count(data, WEIGHTS)
    monkeypatch.setattr(table, "PAIRS", pairs)

    found = table.count(data, WEIGHTS)

    for ours, theirs in zip(vars(found).values(), vars(whole).values(), strict=True):
        assert torch.equal(ours, theirs)


def test_no_event_past_train_stop_is_counted(data):
    items = data.items.clone()
    later = torch.cat([torch.arange(a, b) for a, b in zip(data.train_stop, data.stop, strict=True)])
    items[later] = 1 + torch.randint(data.num_items, (len(later),), dtype=items.dtype)
    assert not torch.equal(items, data.items)

    before, after = (table.count(x, WEIGHTS) for x in (data, replace(data, items=items)))

    assert torch.equal(before.values, after.values)
    assert torch.equal(before.targets, after.targets)


def test_of_each_item_the_largest_counts_are_kept_in_order(data):
    whole, found = square(table.count(data, WEIGHTS)), table.count(data, WEIGHTS, limit=3)

    assert found.offsets.diff().max() == 3
    for item in range(1, len(data.count)):
        kept = slice(int(found.offsets[item]), int(found.offsets[item + 1]))
        assert found.values[kept].tolist() == np.sort(whole[item])[::-1][:3].tolist()
        assert found.values[kept].tolist() == whole[item][found.targets[kept].numpy()].tolist()
