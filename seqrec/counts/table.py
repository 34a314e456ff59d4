"""A sparse table of how often one item follows another in training, weighted by distance, largest counts first.

Shape suffixes: V items, padding (0) included   N stored pairs   E training events   R rows   K largest counts
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
from seqrec.models.base import PAD

Array = NDArray[Any]
PAIRS = 1 << 24  # pairs in memory at once: half a gigabyte
CELLS, DENSE = 1 << 26, 12  # largest dense block, and most cells of it per pair; for more cells, pairs are sorted
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
    order = torch.from_numpy(item_E).argsort(stable=True).numpy()
    bounds = np.searchsorted(item_E[order], np.arange(size + 1))
    dense = size * size <= DENSE * len(item_E) * len(weights)
    parts = []
    for first, stop in _ranges(bounds, max(1, pairs // max(1, len(weights))), CELLS // size if dense else size):
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
    item: Array, rest: Array, event: Array, weights: Sequence[float], first: int, stop: int, size: int, limit: int
) -> tuple[Array, Array, Array]:
    """Return lengths, targets and counts of rows `first` to `stop`, whose source events are `event`."""
    rows, after, start = stop - first, rest.take(event), (item.take(event).astype(np.int64) - first) * size
    key = np.empty((len(weights), len(event)), np.int64)
    for distance, pair in enumerate(key, start=1):  # what follows a user's last event is padding
        np.add(start, item.take(event + distance, mode="clip") * (after >= distance), out=pair)
    share = np.broadcast_to(np.array(weights)[:, np.newaxis], key.shape)
    if rows * size <= min(CELLS, DENSE * key.size):
        row, target, total = _largest(np.bincount(key.ravel(), share.ravel(), rows * size).reshape(rows, size), limit)
    else:
        real = key != start
        distinct, index = np.unique(key[real], return_inverse=True)
        total = np.bincount(index, share[real], len(distinct))
        row, target = np.divmod(distinct, size)
    order = np.lexsort((-total, row))  # stable: equal counts stay ordered by target
    row, target, total = row[order], target[order], total[order]
    kept = np.arange(len(row)) - np.searchsorted(row, row) < limit
    return np.bincount(row[kept], minlength=rows), target[kept], total[kept]


def _largest(total_RV: Array, limit: int) -> tuple[Array, Array, Array]:
    """Return row, target and value of the `limit` largest counts of each row, and of others equal to the least."""
    total_RV[:, PAD] = 0
    largest_RK = torch.from_numpy(total_RV).topk(min(limit, total_RV.shape[1]), sorted=False).values
    found = np.flatnonzero((total_RV >= largest_RK.amin(1, keepdim=True).numpy()) & (total_RV > 0))
    return *np.divmod(found, total_RV.shape[1]), total_RV.ravel()[found]
