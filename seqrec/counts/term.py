"""The count term of a score: alpha * sum_j w_j log(1 + C_{h_j a} |I| / tau) + lambda log pop(a).

C are the counts of table.py; h_j is the j-th event from the end of the history; w_j = rho^j, normalised to sum to 1
over the events of the history. With alpha = 1 and no other scores, the term is PCTM (Petrov et al., RecSys 2026), whose
further factors of P(a | h_j) are the same for all items. As a sum over events, the term is also its own explanation:
each event contributes a known share.

Shape suffixes: B rows   L events   J newest events   V items with padding (0)   C candidates   K targets of an item
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqrec.config import CountsConfig
from seqrec.counts.table import CountTable, count
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.evaluation.ranking import ITEMS_PER_BLOCK, ScoreBlocks, Scorer

Vote = tuple[Tensor, Tensor, Tensor]  # row of the batch, item, value; each item at most once per row and event
Adder = Callable[[Tensor, int], Tensor]  # scores (B, C), first item -> the same scores
Sums = Callable[[int, int], Tensor]  # first item, C -> the sum (B, C) of the votes for these items
DENSE = 1 << 24  # largest dense table in cells, 64 MB: up to 4,095 items
ALL = torch.iinfo(torch.int64).max
KERNELS = {"inverse": 1.0, "root": 0.5, "square": 2.0}  # name -> p of d^-p


@dataclass(frozen=True)
class CountTerm:
    """The term that counts add to the scores of a batch of histories."""

    offsets: Tensor  # (V + 1,) int64: row b of targets and values is offsets[b] to offsets[b + 1]
    targets: Tensor  # (N,) int32
    values: Tensor  # (N,) float32: log(1 + C_ba |I| / tau), or other values to be summed
    weights: Tensor  # (J,) float32: weights of the events, newest first
    log_popularity: Tensor  # (V,) float32
    alpha: float = 1.0
    popularity: float = 0.0  # lambda

    def to(self, device: torch.device) -> CountTerm:
        """Return the same term with every tensor on `device`."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store; `alpha` and `popularity` are stored apart."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def adder(self, items_BL: Tensor) -> Adder:
        """Return a function that adds the term in place to a block of scores (B, C), whose first item is `first`.

        Args:
            items_BL: histories, left-padded with 0, without MASK.
        """
        sums = self._dense_sums(items_BL) if self.is_small else self._sparse_sums(items_BL)

        def add(score_BC: Tensor, first: int = 0) -> Tensor:
            score_BC += sums(first, score_BC.shape[1])
            if self.popularity:
                score_BC += self.popularity * self.log_popularity[first : first + score_BC.shape[1]]
            return score_BC

        return add

    @property
    def is_small(self) -> bool:
        """Whether a dense (V, V) table of the values is used."""
        return len(self.log_popularity) ** 2 <= DENSE

    @cached_property
    def _dense(self) -> Tensor:
        """The values as a dense (V, V) table, several times faster than lists of pairs on dense logs."""
        size = len(self.log_popularity)
        row, pair = self.pairs(torch.arange(size, device=self.offsets.device))
        dense = self.values.new_zeros(size, size)
        dense[row, self.targets[pair].long()] = self.values[pair]
        return dense

    def _dense_sums(self, items_BL: Tensor) -> Sums:
        items_BJ, weight_BJ = self.newest(items_BL)
        sum_BV = F.embedding_bag(items_BJ, self._dense, per_sample_weights=weight_BJ, mode="sum")
        return lambda first, width: sum_BV[:, first : first + width]

    def _sparse_sums(self, items_BL: Tensor) -> Sums:
        votes = self.votes(items_BL)

        def sums(first: int, width: int) -> Tensor:
            sum_BC = self.values.new_zeros(len(items_BL), width)
            for row, item, value in votes:  # one event after the other, so that a GPU adds in a fixed order
                inside = (item >= first) & (item < first + width)
                cell = row[inside] * width + item[inside] - first
                sum_BC.view(-1).index_add_(0, cell, value[inside])
            return sum_BC

        return sums

    def newest(self, items_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the newest events (B, J), newest first, and their weights times alpha."""
        items_BJ = items_BL.flip(1)[:, : len(self.weights)]
        weight_BJ = self.weights[: items_BJ.shape[1]] * (items_BJ > 0)
        return items_BJ, self.alpha * weight_BJ / weight_BJ.sum(1, keepdim=True).clamp(min=1e-9)

    def pairs(self, items: Tensor, most: int = ALL) -> tuple[Tensor, Tensor]:
        """Return the pairs of some items (N,): for each pair the item's place in `items`, and its place in `targets`.

        Args:
            items: items, of which any may occur several times.
            most: number of pairs per item, the first ones.
        """
        first = self.offsets[items]
        number = (self.offsets[items + 1] - first).clamp(max=most)
        row = torch.repeat_interleave(torch.arange(len(items), device=items.device), number)
        pair = torch.arange(len(row), device=row.device) + (first - number.cumsum(0) + number)[row]
        return row, pair

    def padded(self, items: Tensor, most: int = ALL) -> tuple[Tensor, Tensor]:
        """Return targets (N, K) int32 and values (N, K) of some items (N,), filled up with 0; see `pairs`."""
        row, pair = self.pairs(items, most)
        column = pair - self.offsets[items][row]
        shape = (len(items), max(1, int(self.offsets.diff().max().clamp(max=most))))
        targets, values = self.targets.new_zeros(shape), self.values.new_zeros(shape)
        targets[row, column], values[row, column] = self.targets[pair], self.values[pair]
        return targets, values

    def votes(self, items_BL: Tensor) -> list[Vote]:
        """Return what each of the newest events adds to the scores, newest first; see `adder`."""
        votes = []
        for item_B, weight_B in zip(*(x.unbind(1) for x in self.newest(items_BL)), strict=True):
            row, pair = self.pairs(item_B)
            votes.append((row, self.targets[pair].long(), weight_B[row] * self.values[pair]))
        return votes

    def shares(self, items_BL: Tensor, item_BC: Tensor) -> Tensor:
        """Return (B, C, L): what each event of the history adds to the score of each candidate, without popularity."""
        share_BCL = self.values.new_zeros(*item_BC.shape, items_BL.shape[1])
        size = len(self.log_popularity)
        wanted_BC = torch.arange(len(item_BC), device=item_BC.device).unsqueeze(1) * size + item_BC
        for j, (row, item, value) in enumerate(self.votes(items_BL), start=1):
            key, order = (row * size + item).sort()
            found_BC = torch.searchsorted(key, wanted_BC)
            present_BC = F.pad(key, (0, 1), value=-1)[found_BC] == wanted_BC
            share_BCL[:, :, -j] = F.pad(value[order], (0, 1))[found_BC] * present_BC
        return share_BCL

    def of(self, items_BL: Tensor, item_BC: Tensor) -> Tensor:
        """Return the term (B, C) of the given candidates."""
        return self.shares(items_BL, item_BC).sum(2) + self.popularity * self.log_popularity[item_BC]

    def grown(self, size: int) -> CountTerm:
        """Return the term for a catalogue enlarged to `size` rows, with padding, by items without events."""
        more = size - len(self.log_popularity)
        return replace(
            self,
            offsets=F.pad(self.offsets, (0, more), value=int(self.offsets[-1])),
            log_popularity=F.pad(self.log_popularity, (0, more), value=float(self.log_popularity[1:].min())),
        )


def kernel(name: str, length: int) -> Tensor:
    """Return the weights (length,) of distances 1, 2, ...: `inverse` 1/d, `root` d^-0.5, `square` d^-2, or 0.7^(d-1).

    >>> kernel("inverse", 3).tolist() == [1.0, 1 / 2, 1 / 3], kernel("0.5", 3).tolist()
    (True, [1.0, 0.5, 0.25])
    """
    distance = torch.arange(1, length + 1, dtype=torch.float64)
    return distance ** -KERNELS[name] if name in KERNELS else float(name) ** (distance - 1)


def log_popularity(data: Sequences) -> Tensor:
    """Return (V,) float32: log of each item's share of the training events, plus-one smoothed; 0 for padding."""
    events = data.count.double()
    share = ((events + 1) / (events.sum() + data.num_items)).log()
    share[0] = 0.0
    return share.float()


def build(data: Sequences, config: CountsConfig, table: CountTable | None = None) -> CountTerm:
    """Return the term with the counts of the training events of `data`, taken from `table` if given."""
    table = table or count(data, kernel(config.kernel, config.window).tolist(), config.targets)
    return CountTerm(
        offsets=table.offsets,
        targets=table.targets,
        values=torch.log1p(table.values / config.smoothing),
        weights=kernel(str(config.rho), config.events).float(),
        log_popularity=log_popularity(data),
        alpha=config.alpha,
        popularity=config.popularity,
    )


def with_counts(scorer: Scorer, term: CountTerm | None) -> Scorer:
    """Return `scorer` with the term added to its scores, or unchanged without a term."""
    if term is None:
        return scorer

    def added(data: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
        blocks = scorer(data, user, stop)
        add = term.adder(sequences.window(data, user, stop, len(term.weights)).items)

        def both() -> Iterator[tuple[int, Tensor]]:
            for first, score_BC in blocks():
                yield first, add(score_BC, first)

        return both

    return added


def nothing(data: Sequences, user: Tensor, _: Tensor) -> ScoreBlocks:
    """Score every item 0: the base scorer of baselines that only count."""

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for first in range(1, len(data.count), ITEMS_PER_BLOCK):
            width = min(ITEMS_PER_BLOCK, len(data.count) - first)
            yield first, torch.zeros(len(user), width, device=data.device)

    return blocks


def by_halves(even: Scorer, odd: Scorer) -> Scorer:
    """Return a scorer that uses `even` for users of even index and `odd` for the others."""

    def scorer(data: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
        rows = [(user % 2 == parity).nonzero().squeeze(1) for parity in (0, 1)]
        asked = [(row, half) for row, half in zip(rows, (even, odd), strict=True) if len(row)]
        parts = [(row, half(data, user[row], stop[row])) for row, half in asked]

        def blocks() -> Iterator[tuple[int, Tensor]]:
            for found in zip(*(part() for _, part in parts), strict=True):
                score_BC = found[0][1].new_empty(len(user), found[0][1].shape[1])
                for (row, _), (_, part) in zip(parts, found, strict=True):
                    score_BC[row] = part
                yield found[0][0], score_BC

        return blocks

    return scorer
