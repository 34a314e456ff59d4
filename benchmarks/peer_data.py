"""What the peers' scripts share: the prepared sequences as NumPy arrays, and the report they print.

Everything here needs NumPy and pyarrow alone: it runs inside the peers' own environments.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Histories:
    """The events of users 0..U-1 in one flat array, items 1..N; user u owns `start[u]` to the next one's start."""

    items: np.ndarray  # (E,) int64
    start: np.ndarray  # (U,) int64
    train_stop: np.ndarray  # (U,): first event that training must not see
    valid_stop: np.ndarray  # (U,): the event to rank; everything before it is the history

    @property
    def num_items(self) -> int:
        """Size of the catalogue."""
        return int(self.items.max())

    def windows(self, stop: np.ndarray, length: int, padding: int = 0) -> np.ndarray:
        """Return (U, length): each user's last events before `stop` (U,), left-padded."""
        index = stop[:, None] + np.arange(-length, 0)
        return np.where(index >= self.start[:, None], self.items[np.maximum(index, 0)], padding)

    def of(self, users: slice) -> Histories:
        """Return the histories of `users` alone."""
        return replace(
            self, start=self.start[users], train_stop=self.train_stop[users], valid_stop=self.valid_stop[users]
        )

    def to_validation(self) -> Histories:
        """Return the histories with the validation event as the one to rank."""
        return replace(self, valid_stop=self.train_stop)

    def ndcg(self, top: np.ndarray) -> float:
        """Return the mean NDCG of lists (U, k) of items 1..N, one for each user."""
        hit = top == self.items[self.valid_stop][:, None]
        return float((hit / np.log2(np.arange(2, top.shape[1] + 2))).sum(1).mean())

    def check_unseen(self, top: np.ndarray) -> None:
        """Raise unless no list (U, k) of items 1..N holds an item of its user's history.

        The event to rank is allowed, should it repeat one: our engine keeps it as a candidate.
        """
        assert top.min() >= 1
        for user, best in enumerate(top):
            target = self.items[self.valid_stop[user]]
            seen = self.items[self.start[user] : self.valid_stop[user]]
            assert not np.isin(best[best != target], seen).any(), f"user {user} is recommended items of the history"


def read(sequences: Path, users: int = 0) -> Histories:
    """Read `sequences.arrow` of the prepared dataset `sequences`, its first `users` users (0 = all)."""
    table = pa.ipc.open_file(pa.memory_map(str(sequences / "sequences.arrow"))).read_all()
    items = table["items"].combine_chunks()
    start = items.offsets.to_numpy()[:-1].astype(np.int64)
    ends = (table[name].to_numpy() for name in ("train_end", "valid_end"))
    histories = Histories(items.values.to_numpy().astype(np.int64), start, *(start + end for end in ends))
    return histories.of(slice(0, users or None))


@dataclass
class UntilBest:
    """The epochs of a training that ends when validation has not improved for `patience` of them."""

    patience: int
    epochs: list[tuple[float, float]] = field(default_factory=list)  # CPU seconds of training so far, NDCG@10

    def over(self, seconds: float, ndcg: float) -> bool:
        """Add an epoch, its CPU seconds and its NDCG@10 on validation; return whether the training ends."""
        self.epochs.append((seconds + (self.epochs[-1][0] if self.epochs else 0.0), ndcg))
        print(self.epochs[-1], file=sys.stderr, flush=True)
        best = max(range(len(self.epochs)), key=lambda number: self.epochs[number][1])
        return len(self.epochs) - 1 - best >= self.patience


def arguments() -> argparse.Namespace:
    """Parse what `peers.py` gives to every contestant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=Path, required=True)
    parser.add_argument("--users", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    return parser.parse_args()
