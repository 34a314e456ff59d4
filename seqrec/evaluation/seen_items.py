"""The filter of seen items: candidates that the user has already interacted with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqrec.data import sequences
from seqrec.data.sequences import Sequences


@dataclass(frozen=True)
class SeenItems:
    """The distinct items in the history of each row of a block of cases."""

    row: Tensor  # (S,) int64, 0..B-1
    item: Tensor  # (S,) int64

    @classmethod
    def before(cls, data: Sequences, user: Tensor, stop: Tensor) -> SeenItems:
        """Return the items before the flat index `stop` (B,) of each `user` (B,)."""
        row, item = sequences.seen(data, user, stop)
        distinct = torch.unique(row * (data.num_items + 1) + item)
        return cls(distinct // (data.num_items + 1), distinct % (data.num_items + 1))

    def without(self, target_B: Tensor) -> SeenItems:
        """Return the seen items without each row's target, which remains a candidate."""
        rival = self.item != target_B[self.row]
        return SeenItems(self.row[rival], self.item[rival])

    def within(self, first: int, score: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column of the seen items in `score` (B, N), whose first column is item `first`."""
        inside = (self.item >= first) & (self.item < first + score.shape[1])
        return self.row[inside], self.item[inside] - first
