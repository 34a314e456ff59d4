"""A sparse table of how often one item follows another in training, weighted by distance, largest counts first.

Shape suffixes: V items, padding (0) included   N stored pairs   E training events   R rows   K kernels
S same time, or another   D distances
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqrec.data import ties
from seqrec.data.sequences import Sequences, train_events

Array = NDArray[Any]
Rows = tuple[Array, Array, Array]  # lengths of rows, their targets and values
PAIRS = 1 << 21  # pairs in memory at once in each thread: 150 MB
MOST_TARGETS, FEWEST_TARGETS = 1024, 64  # kept per item; 512 instead of 1024 cost 0.0006 NDCG@10 on MovieLens-1M
WEIGHT_BITS = 12  # for a distance of up to 2,048, at the same time or another
MOST_BITS = (1 << 31) - 1  # of a positive float32, read as a whole number
STORED = 1 << 25  # maximum number of pairs kept in total


@dataclass(frozen=True)
class CountTable:
    """Row b holds the items that follow b: targets[offsets[b] : offsets[b + 1]]."""

    offsets: Tensor  # (V + 1,) int64
    targets: Tensor  # (N,) int32
    values: Tensor  # (N,) float32; each row is sorted by falling value, then by target


def most_targets(num_items: int) -> int:
    """Return the number of targets kept per item: 1024 for up to 32,768 items, then fewer, at least 64.

    >>> most_targets(1_349), most_targets(100_000), most_targets(1_000_000)
    (1024, 335, 64)
    """
    return max(FEWEST_TARGETS, min(MOST_TARGETS, STORED // max(1, num_items)))


def count(data: Sequences, weights: Sequence[float], limit: int = 0, across: float = 1.0) -> CountTable:
    """Return the table of one kernel; see `count_all`."""
    return count_all(data, [weights], limit, across)[0]


def count_all(
    data: Sequences, kernels: Sequence[Sequence[float]], limit: int = 0, across: float = 1.0
) -> list[CountTable]:
    """Return C_ba = sum_d weights[d - 1] N^(d)_ba for the weights of each kernel, from one sort of all pairs.

    N^(d)_ba counts how often b is d training events before a. A pair of events at different times counts as `across`
    pairs. If events of the same time have a random order (ties.py), C is the mean for this order and its reverse. Each
    of torch's threads holds PAIRS pairs, and never splits those of one item. The result depends on neither number. At
    most `limit` targets are kept per item, those with the largest counts; 0: as many as `most_targets` says.
    """
    events, orders = _train(data)
    window = max(map(len, kernels))
    padded = [[*weights, *[0.0] * (window - len(weights))] for weights in kernels]
    weight_KSD = np.stack([np.outer([1.0, across], weights) / orders for weights in padded])
    limit, size = limit or most_targets(data.num_items), len(data.count)
    order = torch.from_numpy(events.item_E).argsort(stable=True).numpy()
    bounds, bits = np.searchsorted(events.item_E[order], np.arange(size + 1)), size.bit_length()

    def rows(limits: tuple[int, int]) -> list[Rows]:
        first, stop = limits
        event = order[bounds[first] : bounds[stop]]
        return _rows(events, event, weight_KSD, first, stop, bits, limit)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # numpy lets other threads work meanwhile
        parts = list(threads.map(rows, _ranges(bounds, max(1, PAIRS // max(1, window)), 1 << (32 - bits))))
    return [_table(list(of_kernel)) for of_kernel in zip(*parts, strict=True)]


def _table(parts: Sequence[Rows]) -> CountTable:
    number, targets, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return CountTable(
        offsets=torch.from_numpy(np.concatenate([[0], number.cumsum()])),
        targets=torch.from_numpy(targets),
        values=torch.from_numpy(values),
    )


class _Train(NamedTuple):
    """Training events, once or in two orders."""

    item_E: Array
    rest_E: Array  # number of later training events of the user
    group_E: Array  # user and time as one number


def _train(data: Sequences) -> tuple[_Train, int]:
    """Return the training events, and the number of orders."""
    orders = [data] if ties.are_ordered(data) else [data, ties.mirrored(data)]
    items = [train_events(one)[1] for one in orders]
    user, _ = train_events(data)
    after = (data.train_stop - data.start).cumsum(0)[user] - 1 - torch.arange(len(user))
    columns = torch.cat(items), *(column.repeat(len(orders)) for column in (after, ties.groups(data)[1]))
    return _Train(*(column.int().numpy() for column in columns)), len(orders)


def _ranges(bounds: Array, events: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `rows` items with at most `events` events in total, or of one item."""
    first, last = 0, len(bounds) - 1
    while first < last:
        stop = min(first + rows, int(np.searchsorted(bounds, bounds[first] + events, side="right")) - 1)
        stop = max(first + 1, stop)
        yield first, stop
        first = stop


def _rows(events: _Train, event: Array, weight_KSD: Array, first: int, stop: int, bits: int, limit: int) -> list[Rows]:
    """Return lengths, targets and counts of rows `first` to `stop`, whose source events are `event`, for each kernel.

    Each sort is of whole numbers that hold in their bits all that is needed: several times as fast as an argsort.
    """
    source, pairs = events.item_E.take(event).astype(np.int64) - first, []
    across, window = (weight_KSD[:, 0] != weight_KSD[:, 1]).any(), weight_KSD.shape[2]
    for distance in range(window):
        inside = events.rest_E.take(event) > distance
        source, event = source[inside], event[inside]
        later = event + distance + 1
        apart = events.group_E.take(event) != events.group_E.take(later) if across else 0
        pairs.append(((source << bits | events.item_E.take(later)) << WEIGHT_BITS) | distance + window * apart)
    key = np.concatenate(pairs)
    key.sort()
    pair = key >> WEIGHT_BITS
    begins = np.append(True, pair[1:] != pair[:-1])[: len(pair)]  # of the entries of one pair, the first
    group, weight = begins.cumsum() - 1, key & (1 << WEIGHT_BITS) - 1
    return [
        _largest(pair[begins], np.bincount(group, weight_SD.ravel()[weight]), stop - first, bits, limit)
        for weight_SD in weight_KSD
    ]


def _largest(pair: Array, total: Array, rows: int, bits: int, limit: int) -> Rows:
    """Return lengths, targets and totals of `rows` rows; each keeps the `limit` pairs with the largest totals."""
    pair, total = pair[total > 0], total[total > 0].astype(np.float32)  # some are out of the window
    row, target = pair >> bits, pair & (1 << bits) - 1
    key = (row << 31 | MOST_BITS - total.view(np.int32)) << bits | target
    key.sort()  # by row, by falling count and by target, since the bits of positive floats rise with their values
    number = np.bincount(row, minlength=rows)
    kept = np.arange(len(key)) - np.repeat(number.cumsum() - number, number) < limit
    key = key[kept]
    values = (MOST_BITS - (key >> bits & MOST_BITS)).astype(np.int32).view(np.float32)
    return number.clip(max=limit), (key & (1 << bits) - 1).astype(np.int32), values
