"""A sparse table of how often one item follows another in training, weighted by distance, largest counts first.

Shape suffixes: V items, padding (0) included   N stored pairs   E training events   R rows   K largest counts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqrec.data import ties
from seqrec.data.sequences import Sequences, train_events

Array = NDArray[Any]
PAIRS = 1 << 21  # pairs in memory at once in each thread: 150 MB
MOST_TARGETS, FEWEST_TARGETS = 1024, 64  # kept per item; 512 instead of 1024 cost 0.0006 NDCG@10 on MovieLens-1M
DISTANCE_BITS = 12  # for a distance of up to 4,095
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


def count(data: Sequences, weights: Sequence[float], limit: int = 0) -> CountTable:
    """Return C_ba = sum_d weights[d - 1] N^(d)_ba, where N^(d)_ba counts how often b is d training events before a.

    If events of the same time have a random order (ties.py), C is the mean for this order and its reverse.
    Each of torch's threads holds PAIRS pairs, and never splits those of one item. The result depends on neither number.
    At most `limit` targets are kept per item, those with the largest counts; 0: as many as `most_targets` says.
    """
    item_E, rest_E, orders = _train(data)
    weights = [weight / orders for weight in weights]
    limit, size = limit or most_targets(data.num_items), len(data.count)
    order = torch.from_numpy(item_E).argsort(stable=True).numpy()
    bounds, bits = np.searchsorted(item_E[order], np.arange(size + 1)), size.bit_length()

    def rows(limits: tuple[int, int]) -> tuple[Array, Array, Array]:
        first, stop = limits
        event = order[bounds[first] : bounds[stop]]
        return _rows(item_E, rest_E, event, np.array(weights), first, stop, bits, limit)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # numpy lets other threads work meanwhile
        parts = list(threads.map(rows, _ranges(bounds, max(1, PAIRS // max(1, len(weights))), 1 << (32 - bits))))
    number, targets, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return CountTable(
        offsets=torch.from_numpy(np.concatenate([[0], number.cumsum()])),
        targets=torch.from_numpy(targets),
        values=torch.from_numpy(values),
    )


def _train(data: Sequences) -> tuple[Array, Array, int]:
    """Return items (E,) and numbers (E,) of later training events of the user, once or in two orders, and which."""
    orders = [data] if ties.are_ordered(data) else [data, ties.mirrored(data)]
    items = [train_events(one)[1] for one in orders]
    user, _ = train_events(data)
    after = (data.train_stop - data.start).cumsum(0)[user] - 1 - torch.arange(len(user))
    return torch.cat(items).int().numpy(), after.repeat(len(orders)).int().numpy(), len(orders)


def _ranges(bounds: Array, events: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `rows` items with at most `events` events in total, or of one item."""
    first, last = 0, len(bounds) - 1
    while first < last:
        stop = min(first + rows, int(np.searchsorted(bounds, bounds[first] + events, side="right")) - 1)
        stop = max(first + 1, stop)
        yield first, stop
        first = stop


def _rows(
    item: Array, rest: Array, event: Array, weights: Array, first: int, stop: int, bits: int, limit: int
) -> tuple[Array, Array, Array]:
    """Return lengths, targets and counts of rows `first` to `stop`, whose source events are `event`.

    Each sort is of whole numbers that hold in their bits all that is needed: several times as fast as an argsort.
    """
    source, pairs = item.take(event).astype(np.int64) - first, []
    for distance in range(len(weights)):
        inside = rest.take(event) > distance
        source, event = source[inside], event[inside]
        pairs.append(((source << bits | item.take(event + distance + 1)) << DISTANCE_BITS) | distance)
    key = np.concatenate(pairs)
    key.sort()
    pair = key >> DISTANCE_BITS
    begins = np.append(True, pair[1:] != pair[:-1])[: len(pair)]  # of the entries of one pair, the first
    total = np.bincount(begins.cumsum() - 1, weights[key & (1 << DISTANCE_BITS) - 1]).astype(np.float32)
    pair = pair[begins]
    row, target = pair >> bits, pair & (1 << bits) - 1
    key = (row << 31 | MOST_BITS - total.view(np.int32)) << bits | target
    key.sort()  # by row, by falling count and by target, since the bits of positive floats rise with their values
    number = np.bincount(row, minlength=stop - first)
    kept = np.arange(len(key)) - np.repeat(number.cumsum() - number, number) < limit
    key = key[kept]
    values = (MOST_BITS - (key >> bits & MOST_BITS)).astype(np.int32).view(np.float32)
    return number.clip(max=limit), (key & (1 << bits) - 1).astype(np.int32), values
