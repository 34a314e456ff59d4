"""Prepared sequences as flat tensors, and the windows of events that models read.

One array holds the events of all users, ordered by user and time; each user is a range of it. All functions here gather
from it, without loops over users or copies per prefix. On the host, the array is the memory-mapped file: a gather reads
only the pages it needs, so the data may be larger than memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack

from seqrec.artifacts import (
    NEGATIVES,
    SEQUENCES,
    SEQUENCES_SCHEMA,
    SPLIT_CARD,
    USERS,
    VOCABULARY,
    map_ipc,
    read_json,
    read_table,
)
from seqrec.models.base import PAD, Batch

WIDTH_STEP = 8  # widths of batches are rounded up to a multiple, so that there are few shapes


class Shards:
    """Consecutive arrays on the host, indexed as one array without concatenating them."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self.stop = torch.tensor([len(part) for part in parts]).cumsum(0)
        self.device = parts[0].device

    def __len__(self) -> int:
        return int(self.stop[-1])

    def __getitem__(self, index: Tensor) -> Tensor:
        """Return the values at `index`, a tensor of indices of any shape or a boolean mask."""
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        shard = torch.bucketize(index, self.stop, right=True)
        values = torch.empty(index.shape, dtype=self.parts[0].dtype)
        for number, part in enumerate(self.parts):
            chosen = shard == number
            values[chosen] = part[index[chosen] - (self.stop[number] - len(part))]
        return values

    def to(self, device: torch.device) -> Tensor | Shards:
        """Return the values on `device`: these shards on the host, one tensor elsewhere."""
        return self if device.type == "cpu" else torch.cat([part.to(device) for part in self.parts])


Flat = Tensor | Shards


@dataclass(frozen=True, eq=False)
class Sequences:
    """The prepared dataset; `start` to `stop` are indices into the flat arrays, one entry per user 1..U.

    It equals itself alone, so that what is computed from it can be kept.
    """

    items: Flat  # (E,) int32
    times: Flat  # (E,) int64, seconds UTC
    start: Tensor  # (U,) int64: first event
    train_stop: Tensor  # (U,) int64: first event after training
    valid_start: Tensor  # (U,) int64: first validation event; later than train_stop if events are read but not learnt
    valid_stop: Tensor  # (U,) int64: first test event
    stop: Tensor  # (U,) int64: index after the last event
    count: Tensor  # (V,) int64: training events of each item; entry 0 is padding
    card: dict[str, Any]  # split.json
    negatives: Tensor | None = None  # (U, 100) int32: sampled negatives of each user, protocol LOO-101 only
    consumer: torch.device | None = None  # device of gathered values; None: that of the arrays

    @property
    def num_items(self) -> int:
        """Size of the catalogue."""
        return len(self.count) - 1

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.start)

    def trained(self, user: Tensor | slice = slice(None)) -> Tensor:
        """Return bool: whether each user has a training target, that is, at least two training events."""
        return self.train_stop[user] - self.start[user] >= 2

    @property
    def device(self) -> torch.device:
        """Device of gathered batches."""
        return self.consumer or self.start.device

    def to(self, device: torch.device, *, resident: bool = True) -> Sequences:
        """Return the data with every tensor on `device`, or, if not `resident`, only gathered batches."""
        if not resident:
            return replace(self, count=self.count.to(device), consumer=device)
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor | Shards)
        }
        return replace(self, **moved)

    def sent(self, gathered: Tensor) -> Tensor:
        """Return `gathered` on the device of batches."""
        return sent(gathered, self.device)


@dataclass(frozen=True)
class Cases:
    """Ranking cases: predict the event at `position` from the user's earlier events."""

    user: Tensor  # (C,) int64, index 0..U-1 into Sequences.start
    position: Tensor  # (C,) int64, index into the flat arrays

    def __len__(self) -> int:
        return len(self.user)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return `values` on `device`; copied from pinned memory, so that the host need not wait."""
    if values.device == device:
        return values
    pinned = values.contiguous().pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


def load(directory: Path) -> Sequences:
    """Map the prepared dataset in `directory` into memory, without copying values or offsets.

    As long as its files are unchanged and no other dataset is loaded, the result is the same object.

    Raises:
        ValueError: the file is not a prepared dataset of this version.
    """
    files = [directory / name for name in (SEQUENCES, VOCABULARY, SPLIT_CARD, NEGATIVES)]
    return _load(directory, tuple((file.stat().st_mtime_ns, file.stat().st_ino) for file in files if file.exists()))


@functools.lru_cache(maxsize=1)
def _load(directory: Path, versions: tuple[tuple[int, int], ...]) -> Sequences:
    """Return the dataset of these versions of its files."""
    table = map_ipc(directory / SEQUENCES)
    if not table.schema.equals(SEQUENCES_SCHEMA):
        raise ValueError(
            f"{directory / SEQUENCES} has a schema that this version of seqrec cannot read: run the prepare stage again"
        )
    length = torch.cat([from_dlpack(chunk.offsets).diff() for chunk in table["items"].chunks]).long()
    stop = length.cumsum(0)
    start = stop - length
    count = read_table(directory / VOCABULARY, ["count"])["count"].combine_chunks()
    train_stop, valid_stop = (start + from_dlpack(table[end].combine_chunks()) for end in ("train_end", "valid_end"))
    times, card = _flat(table["times"]), read_json(directory / SPLIT_CARD)
    return Sequences(
        items=_flat(table["items"]),
        times=times,
        start=start,
        train_stop=train_stop,
        valid_start=_valid_start(times, start, train_stop, valid_stop, card.get("valid_cut")),
        valid_stop=valid_stop,
        stop=stop,
        count=F.pad(from_dlpack(count), (1, 0)),
        card=card,
        negatives=_negatives(directory) if card["protocol"] == "LOO-101" else None,
    )


def _valid_start(times: Flat, start: Tensor, train_stop: Tensor, valid_stop: Tensor, cut: int | None) -> Tensor:
    """Return the first validation event (U,) of each user: the first after a `cut` in time, if there is one."""
    if cut is None:
        return train_stop
    new = (train_stop == start).nonzero().squeeze(1)
    row, event = ranges(start[new], valid_stop[new] - start[new])
    return train_stop.index_add(0, new, torch.bincount(row[times[event] < cut], minlength=len(new)))


def _flat(lists: pa.ChunkedArray) -> Flat:
    parts = [from_dlpack(chunk.values) for chunk in lists.chunks]
    return parts[0] if len(parts) == 1 else Shards(parts)


def _negatives(directory: Path) -> Tensor:
    table = map_ipc(directory / NEGATIVES)
    column = table["negatives"].combine_chunks()
    return from_dlpack(column.values).view(len(column), -1)


def read_items(directory: Path) -> list[str]:
    """Return the item_id of items 1, 2, ... of the prepared dataset."""
    return read_table(directory / VOCABULARY, ["item_id"])["item_id"].to_pylist()


def read_users(directory: Path) -> list[str]:
    """Return the user_id of users 1, 2, ... of the prepared dataset."""
    return read_table(directory / USERS, ["user_id"])["user_id"].to_pylist()


def cases(data: Sequences, split: str) -> Cases:
    """Return the ranking cases of `split` (valid or test), ordered by user and position; with `max_cases` a sample."""
    first, stop = (data.valid_start, data.valid_stop) if split == "valid" else (data.valid_stop, data.stop)
    if data.card.get("cases") == "first":
        stop = torch.minimum(stop, first + 1)
    elif data.card.get("cases") == "last":
        first = torch.maximum(first, stop - 1)
    user, position = ranges(first, stop - first)
    if 0 < (most := data.card.get("max_cases", 0)) < len(user):
        generator = torch.Generator().manual_seed(data.card["seed"])
        drawn = torch.randperm(len(user), generator=generator)[:most].sort().values.to(user.device)
        user, position = user[drawn], position[drawn]
    return Cases(user, position)


def ranges(first: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return row i and index first[i], first[i] + 1, ... of the `number[i]` entries of each row, row after row.

    >>> [column.tolist() for column in ranges(torch.tensor([5, 0, 9]), torch.tensor([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [5, 6, 9, 10, 11]]
    """
    row = torch.repeat_interleave(number.long())
    return row, (first - number.cumsum(0) + number).index_select(0, row).add_(torch.arange(len(row), device=row.device))


def median_gap(data: Sequences) -> float:
    """Return the median over users of the seconds between their last two training events; a day if nobody has two."""
    last = data.train_stop[data.trained()] - 1
    if len(last) == 0:
        return 86_400.0
    return float((data.times[last] - data.times[last - 1]).double().median())


def padded_width(longest: int, most: int) -> int:
    """Return the width of a batch with a longest row of `longest` events: a multiple of WIDTH_STEP, at most `most`."""
    return max(1, min(-(-longest // WIDTH_STEP) * WIDTH_STEP, most))


def window(data: Sequences, user: Tensor, stop: Tensor, length: int, *, from_request: bool = False) -> Batch:
    """Return the `length` events before the flat index `stop` (B,) of each `user` (B,), left-padded.

    Times are relative to the last of them. With `from_request` they are relative to the event at `stop`, as if somebody
    had asked at its time; where the user has no such event, to the last event.

    Every user keeps their number, because the weights decide whom they know: a finished training has given all others
    the vector of user 0 (`forget_users` of training/train.py).
    """
    index_BL = stop.unsqueeze(1) + torch.arange(-length, 0, device=stop.device)
    real_BL = index_BL >= data.start[user].unsqueeze(1)
    index_BL = index_BL.clamp(min=0)
    origin_B = torch.where(stop < data.stop[user], stop, stop - 1) if from_request else stop - 1
    times_BL = (data.times[index_BL] - data.times[origin_B.clamp(min=0)].unsqueeze(1)).double()
    items_BL = torch.where(real_BL, data.items[index_BL].long(), PAD)
    return Batch(*map(data.sent, (items_BL, times_BL.masked_fill(~real_BL, 0.0), user + 1)))


def seen(data: Sequences, user: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Return row (0..B-1) and item of every event of each `user` (B,) before the flat index `stop` (B,)."""
    row, event = ranges(data.start[user], stop - data.start[user])
    return data.sent(row), data.sent(data.items[event].long())


def train_events(data: Sequences) -> tuple[Tensor, Tensor]:
    """Return user index and item of every training event, in order."""
    user, event = ranges(data.start, data.train_stop - data.start)
    return user, data.items[event]


def trained_until(data: Sequences, stop: Tensor) -> Sequences:
    """Return `data` with the events of each user before `stop` (U,) in the training part, and no validation part."""
    inside = torch.arange(len(data.items)) < torch.repeat_interleave(stop, data.stop - data.start)
    parts = data.items.parts if isinstance(data.items, Shards) else [data.items]
    sides = inside.split([len(part) for part in parts])
    counts = (torch.bincount(p[i], minlength=len(data.count)) for p, i in zip(parts, sides, strict=True))
    count = torch.stack(list(counts)).sum(0)
    starts, stops = torch.maximum(stop, data.valid_start), torch.maximum(stop, data.valid_stop)
    return replace(data, train_stop=stop, valid_start=starts, valid_stop=stops, count=count)
