"""A sparse table of how often one item follows another in training, weighted by distance, largest counts first.

Shape suffixes: V items, padding (0) included   N stored pairs   E training events
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqrec.data import ties
from seqrec.data.sequences import Sequences, train_events

Array = NDArray[Any]
PAIRS = 1 << 24  # pairs in memory at once: half a gigabyte
CELLS = 1 << 26  # largest dense block; for more cells, sorting is used
MOST_TARGETS, FEWEST_TARGETS = 1024, 64  # kept per item; 512 instead of 1024 cost 0.0006 NDCG@10 on MovieLens-1M
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


def count(data: Sequences, weights: Sequence[float], limit: int = 0, *, pairs: int = PAIRS) -> CountTable:
    """Return C_ba = sum_d weights[d - 1] N^(d)_ba, where N^(d)_ba counts how often b is d training events before a.

    If events of the same time have a random order (ties.py), C is the mean for this order and its reverse.
    Memory holds the training events, `pairs` pairs and the result, which does not depend on `pairs`.

    Args:
        data: the prepared dataset; only training events are read.
        weights: weights of the distances 1, 2, ...
        limit: targets kept per item, those with the largest counts; 0: set by the size of the catalogue.
        pairs: pairs held in memory at once; the pairs of one item are never split.
    """
    item_E, rest_E, orders = _train(data)
    weights = [weight / orders for weight in weights]
    limit, size = limit or most_targets(data.num_items), len(data.count)
    order = np.argsort(item_E, kind="stable")
    bounds = np.searchsorted(item_E[order], np.arange(size + 1))
    parts = []
    for first, stop in _ranges(bounds, max(1, pairs // max(1, len(weights)))):
        event = order[bounds[first] : bounds[stop]]
        parts.append(_rows(item_E, rest_E, event, weights, first, stop, size, limit))
    number, targets, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return CountTable(
        offsets=torch.from_numpy(np.concatenate([[0], number.cumsum()]).astype(np.int64)),
        targets=torch.from_numpy(targets.astype(np.int32)),
        values=torch.from_numpy(values.astype(np.float32)),
    )


def _train(data: Sequences) -> tuple[Array, Array, int]:
    """Return items (E,) and numbers (E,) of later training events of the user, once or in two orders, and which."""
    orders = [data] if ties.are_ordered(data) else [data, ties.mirrored(data)]
    items = [train_events(one)[1] for one in orders]
    user, _ = train_events(data)
    after = (data.train_stop - data.start).cumsum(0)[user] - 1 - torch.arange(len(user))
    return torch.cat(items).numpy(), after.repeat(len(orders)).numpy(), len(orders)


def _ranges(bounds: Array, events: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of items with at most `events` events in total, or of one item."""
    first, last = 0, len(bounds) - 1
    while first < last:
        stop = max(first + 1, int(np.searchsorted(bounds, bounds[first] + events, side="right")) - 1)
        yield first, stop
        first = stop


def _rows(
    item: Array, rest: Array, event: Array, weights: Sequence[float], first: int, stop: int, size: int, limit: int
) -> tuple[Array, Array, Array]:
    """Return lengths, targets and counts of rows `first` to `stop`, whose source events are `event`."""
    keys, shares = [], []
    for distance, weight in enumerate(weights, start=1):
        source = event[rest[event] >= distance]
        keys.append((item[source].astype(np.int64) - first) * size + item[source + distance])
        shares.append(np.full(len(source), weight))
    key, total = _sums(np.concatenate(keys), np.concatenate(shares), (stop - first) * size)
    row, target = np.divmod(key, size)
    order = np.lexsort((-total, row))  # stable: equal counts stay ordered by target
    row, target, total = row[order], target[order], total[order]
    kept = np.arange(len(row)) - np.searchsorted(row, row) < limit
    return np.bincount(row[kept], minlength=stop - first), target[kept], total[kept]


def _sums(key: Array, share: Array, size: int) -> tuple[Array, Array]:
    """Return the distinct keys, sorted, and the sum of the shares of each."""
    if size <= CELLS:
        total = np.bincount(key, share, size)
        found = np.flatnonzero(total)
        return found, total[found]
    distinct, index = np.unique(key, return_inverse=True)
    return distinct, np.bincount(index, share, len(distinct))
