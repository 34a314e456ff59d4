"""The count term of a score: alpha * sum_j w_j log(1 + C_{h_j a} |I| / tau) + lambda log pop(a).

C are the counts of table.py; h_j is the j-th event from the end of the history; w_j = rho^j, normalised to sum to 1
over the events of the history. With alpha = 1 and no other scores, the term is PCTM (Petrov et al., RecSys 2026), whose
further factors of P(a | h_j) are the same for all items. Two sums of the same form can be added, whose event weights do
not sum to 1: `ease` has the weights of EASE in place of the logarithm; in `repeats`, each event votes for its own item.
As sums over events, all are their own explanation: each event contributes a known share.

Shape suffixes: B rows   L events   J newest events   V items with padding (0)   C candidates   K targets of an item
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqrec.config import CountsConfig
from seqrec.counts.ease import ease_table
from seqrec.counts.table import CountTable, count
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.evaluation.ranking import ScoreBlocks, Scorer

Vote = tuple[Tensor, Tensor, Tensor]  # row of the batch, item, value; each item at most once per row and event
Adder = Callable[[Tensor, int], Tensor]  # scores (B, C), first item -> the same scores
Sums = Callable[[int, int], Tensor]  # first item, C -> the sum (B, C) of the votes for these items
DENSE = 1 << 24  # largest dense table in cells, 64 MB: up to 4,095 items
ALL = torch.iinfo(torch.int64).max
UNSCALED = ("ease", "repeats")  # values whose event weights do not sum to 1
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
    kind: str = "log"  # what the values are, see `CountsConfig.values`
    further: Mapping[str, CountTerm] = field(default_factory=dict)  # other terms, to be added: ease, repeats

    @property
    def events(self) -> int:
        """Number of newest events that are read."""
        return max(len(self.weights), *(term.events for term in self.further.values()), 0)

    @property
    def normalised(self) -> bool:
        """Whether the weights are scaled to sum to 1 over the events of a history."""
        return self.kind not in UNSCALED

    def to(self, device: torch.device) -> CountTerm:
        """Return the same term with every tensor on `device`."""
        own = {
            one.name: value.to(device) for one in fields(self) if isinstance(value := getattr(self, one.name), Tensor)
        }
        further = {name: term.to(device) for name, term in self.further.items()}
        return replace(self, **own, further=further)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, those of a further term with the prefix `NAME.`; settings are stored apart."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        further = {f"{part}.{name}": x for part, term in self.further.items() for name, x in term.tensors().items()}
        return {name: value for name, value in own.items() if isinstance(value, Tensor)} | further

    @classmethod
    def stored(cls, tensors: Mapping[str, Tensor], config: CountsConfig) -> CountTerm:
        """Return the term of stored tensors and their settings.

        Raises:
            TypeError: a tensor is missing, or there is one too many.
        """
        further = {}
        for part, term in config.further.items():
            given = {name.removeprefix(f"{part}."): x for name, x in tensors.items() if name.startswith(f"{part}.")}
            further[part] = cls.stored(given, term)
        own: dict[str, Any] = {name: x for name, x in tensors.items() if name.partition(".")[0] not in further}
        return cls(
            **own,
            alpha=config.alpha,
            popularity=config.popularity,
            kind=config.values,
            further=further,
        )

    def histories(self, data: Sequences, user: Tensor, stop: Tensor) -> Tensor:
        """Return the items (B, L) that the term reads before the flat index `stop` (B,) of each `user` (B,)."""
        longest = int((stop - data.start[user]).max())
        return sequences.window(data, user, stop, sequences.padded_width(longest, self.events)).items

    def adder(self, items_BL: Tensor) -> Adder:
        """Return a function that adds the term in place to a block of scores (B, C), whose first item is `first`.

        The histories `items_BL` are left-padded with 0, without MASK.
        """
        sums = self._dense_sums(items_BL) if self.is_small else self._sparse_sums(items_BL)
        further = [term.adder(items_BL) for term in self.further.values()]

        def add(score_BC: Tensor, first: int = 0) -> Tensor:
            score_BC += sums(first, score_BC.shape[1])
            if self.popularity:
                score_BC += self.popularity * self.log_popularity[first : first + score_BC.shape[1]]
            for add_one in further:
                add_one(score_BC, first)
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
            whole = first <= 1 and first + width == len(self.log_popularity)  # without padding or with it
            for row, item, value in votes:  # one event after the other, so that a GPU adds in a fixed order
                if not whole:
                    inside = (item >= first) & (item < first + width)
                    row, item, value = row[inside], item[inside], value[inside]
                sum_BC.view(-1).index_add_(0, torch.add(item - first, row, alpha=width), value)
            return sum_BC

        return sums

    def newest(self, items_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the newest events (B, J), newest first, and their weights times alpha."""
        items_BJ = items_BL.flip(1)[:, : len(self.weights)]
        weight_BJ = self.weights[: items_BJ.shape[1]] * (items_BJ > 0)
        if self.normalised:
            weight_BJ = weight_BJ / weight_BJ.sum(1, keepdim=True).clamp(min=1e-9)
        return items_BJ, self.alpha * weight_BJ

    def pairs(self, items: Tensor, most: int = ALL) -> tuple[Tensor, Tensor]:
        """Return the first `most` pairs of each of some items (N,), which may repeat.

        Each pair is its item's place in `items` and its own place in `targets`.
        """
        first = self.offsets[items]
        number = (self.offsets[items + 1] - first).clamp(max=most)
        return sequences.ranges(first, number)

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
            row, pair = self.pairs(item_B)  # index_select is several times as fast as indexing
            value = weight_B.index_select(0, row).mul_(self.values.index_select(0, pair))
            votes.append((row, self.targets.index_select(0, pair).long(), value))
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
        return sum((term.shares(items_BL, item_BC) for term in self.further.values()), share_BCL)

    def of(self, items_BL: Tensor, item_BC: Tensor) -> Tensor:
        """Return the term (B, C) of the given candidates."""
        return self.shares(items_BL, item_BC).sum(2) + self.popularity * self.log_popularity[item_BC]

    def grown(self, size: int) -> CountTerm:
        """Return the term for a catalogue that gained items without events; `size` is its rows, padding included."""
        before = len(self.log_popularity)
        more = size - before
        own = more if self.kind == "repeats" else 0  # each item votes for itself
        new = torch.arange(more, device=self.offsets.device)
        return replace(
            self,
            offsets=torch.cat([self.offsets, self.offsets[-1] + (new + 1).clamp(max=own)]),
            targets=torch.cat([self.targets, (before + new[:own]).int()]),
            values=F.pad(self.values, (0, own), value=1.0),
            log_popularity=F.pad(self.log_popularity, (0, more), value=float(self.log_popularity[1:].min())),
            further={name: term.grown(size) for name, term in self.further.items()},
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


def build(
    data: Sequences, config: CountsConfig, table_of: Callable[[CountsConfig], CountTable] | None = None
) -> CountTerm:
    """Return the term with the counts of the training events of `data`; `table_of` may know them already."""
    table = table_of(config) if table_of else counted(data, config)
    return CountTerm(
        offsets=table.offsets,
        targets=table.targets,
        values=_values(data, config, table),
        weights=kernel(config.decay or str(config.rho), config.events).float(),
        log_popularity=log_popularity(data),
        alpha=config.alpha,
        popularity=config.popularity,
        kind=config.values,
        further={name: build(data, term, table_of) for name, term in config.further.items()},
    )


def counted(data: Sequences, config: CountsConfig) -> CountTable:
    """Return the table of `config`: counts of pairs, the weights of EASE, or 1 for each item and itself."""
    if config.values == "ease":
        return ease_table(data)
    if config.values == "repeats":
        own = torch.arange(len(data.count) + 1) - 1  # padding has no vote
        return CountTable(own.clamp(min=0), own[2:].int(), torch.ones(data.num_items))
    return count(data, kernel(config.kernel, config.window).tolist(), config.targets, config.across)


def _values(data: Sequences, config: CountsConfig, table: CountTable) -> Tensor:
    """Return the values (N,) of the pairs that `config.values` names.

    They are log(1 + C_ba / tau); what the table has, a count, a weight of EASE or 1; C_ba times the rarity of b; or
    C_ba over the root of the sum of row b.
    """
    if config.values == "log":
        return torch.log1p(table.values / config.smoothing)
    if config.values in ("sum", *UNSCALED):
        return table.values
    number = table.offsets.diff()
    if config.values == "rare":
        return table.values * torch.repeat_interleave(_rarity(data), number)
    row = torch.repeat_interleave(torch.arange(len(number)), number)
    values = table.values.double()
    total_V = values.new_zeros(len(number)).index_add_(0, row, values)
    return (values / total_V.clamp(min=1e-12).sqrt()[row]).float()


def _rarity(data: Sequences) -> Tensor:
    """Return (V,): -log of each item's training events, scaled to 0 for the most frequent and 1 for the rarest item."""
    rare = -data.count.clamp(min=1).log()
    low, high = rare[1:].min(), rare[1:].max()
    return torch.ones_like(rare) if high == low else (rare - low) / (high - low)


def with_counts(scorer: Scorer, term: CountTerm | None) -> Scorer:
    """Return `scorer` with the term added to its scores, or unchanged without a term."""
    if term is None:
        return scorer

    def added(data: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
        blocks = scorer(data, user, stop)
        add = term.adder(term.histories(data, user, stop))

        def both() -> Iterator[tuple[int, Tensor]]:
            for first, score_BC in blocks():
                yield first, add(score_BC, first)

        return both

    return added


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
