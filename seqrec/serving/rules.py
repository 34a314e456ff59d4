"""Rules of what may be shown: filters, boosts and quotas by the attributes of items, and diverse lists.

Shape suffixes: V items, padding included; B lists; N candidates of one list; M limits of one list; D width of an item
vector.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from seqrec.artifacts import read_table

SEPARATORS = re.compile(r"[,|]")  # between the values of one attribute, as in "Comedy, Drama"


@dataclass(frozen=True)
class Range:
    """A condition on a number: at least `min`, at most `max`."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (pydantic reads this name)

    min: float | None = None
    max: float | None = None


Condition = Sequence[str] | Range  # one of these values; or a number within the range
Filter = Mapping[str, Condition]  # attribute -> condition; an item must meet all of them
Boost = Mapping[str, Mapping[str, float]]  # attribute -> value -> how many times as likely its items are to be
Quota = Mapping[str, Mapping[str, int]]  # attribute -> value -> items of a list that may have it
NONE = torch.zeros(0, dtype=torch.int64)  # no items


class Attribute:
    """The values of one attribute, of item 1, 2, ...; None where an item has none."""

    def __init__(self, values: Sequence[str | None]) -> None:
        self.values = values

    @cached_property
    def _items(self) -> dict[str, Tensor]:
        """The numbers of the items that have a value, by the value in lower case."""
        found: dict[str, list[int]] = {}
        for item, text in enumerate(self.values, start=1):
            whole = (text or "").casefold()
            for value in {whole, *SEPARATORS.split(whole)}:
                found.setdefault(value.strip(), []).append(item)
        found.pop("", None)
        return {value: torch.tensor(items) for value, items in found.items()}

    def having(self, value: str) -> Tensor:
        """Return the numbers of the items that have a value."""
        return self._items.get(value.strip().casefold(), NONE)

    def commonest(self, number: int) -> list[str]:
        """Return the values that most items have, the commonest first."""
        texts = [text for text in self.values if text]
        count = Counter(value for text in texts for value in {value.strip() for value in SEPARATORS.split(text)})
        count.pop("", None)
        return [value for value, _ in sorted(count.items(), key=lambda one: (-one[1], one[0]))[:number]]

    @cached_property
    def _numbers(self) -> Tensor:
        """The values (V,) as numbers, NaN where they are none."""
        return torch.tensor([torch.nan, *map(_number, self.values)], dtype=torch.float64)

    def meets(self, condition: Condition) -> Tensor:
        """Return which items (V,) meet a condition; one without a value meets none."""
        if not isinstance(condition, Range):
            meets_V = torch.zeros(1 + len(self.values), dtype=torch.bool)
            for value in set(condition):
                meets_V[self.having(value)] = True
            return meets_V
        meets_V = ~self._numbers.isnan()
        if condition.min is not None:
            meets_V &= self._numbers >= condition.min
        if condition.max is not None:
            meets_V &= self._numbers <= condition.max
        return meets_V


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")


class Attributes(dict[str, Attribute]):
    """The attributes of a catalogue by name. What filters look up is built when a filter first asks for it."""

    @classmethod
    def read(cls, items: Path, item_ids: Sequence[str]) -> Attributes:
        """Read the items table that `ingest` wrote.

        Args:
            items: the table: `item_id`, `title`, and any attributes.
            item_ids: of item 1, 2, ...; those that the table lacks have no values.
        """
        table = read_table(items)
        row = pc.index_in(pa.array(item_ids, pa.string()), table["item_id"].combine_chunks())
        names = [name for name in table.column_names if name not in ("item_id", "title")]
        return cls({name: Attribute(table[name].combine_chunks().take(row).to_pylist()) for name in names})

    def grown(self, items: Sequence[Mapping[str, str]]) -> Attributes:
        """Return these attributes with those of more items."""
        return Attributes(
            {name: Attribute([*old.values, *(item.get(name) for item in items)]) for name, old in self.items()}
        )

    def check(self, rule: str, wanted: Iterable[str]) -> None:
        """Raise ValueError where a rule names an attribute that is not known."""
        for name in set(wanted) - self.keys():
            known = ", ".join(sorted(self)) or "none: start the service with --items data/items.parquet"
            raise ValueError(f"{rule}: attribute {name!r} is unknown; known: {known}")

    def factors(self, boost: Boost) -> Tensor | float:
        """Return the product of the factors (V,) of each item; 1 where there are none at all."""
        if not boost:
            return 1.0
        factor_V = torch.ones(1 + max((len(known.values) for known in self.values()), default=0))
        for name, values in boost.items():
            for value, factor in values.items():
                factor_V[self[name].having(value)] *= factor
        return factor_V

    def limits(self, quota: Quota, item_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the items have each value of a quota (M, N), and how many of them may be chosen (M,)."""
        size = 1 + max((len(known.values) for known in self.values()), default=0)
        most = [most for values in quota.values() for most in values.values()]
        member_MN = torch.zeros(len(most), len(item_N), dtype=torch.bool)
        pairs = ((name, value) for name, values in quota.items() for value in values)
        for row, (name, value) in enumerate(pairs):
            has_V = torch.zeros(size, dtype=torch.bool)
            has_V[self[name].having(value)] = True
            member_MN[row] = has_V[item_N]
        return member_MN, torch.tensor(most, dtype=torch.int64)


class Candidates(NamedTuple):
    """The items of which a list is chosen, and how."""

    score_N: Tensor  # finite
    vector_ND: Tensor  # item vectors
    diversity: float = 0.0  # 0 = by score alone, 1 = by similarity alone after the first
    member_MN: Tensor = NONE.view(0, 1)  # which of them count for each limit; an item may be under several limits
    most_M: Tensor = NONE  # how many of these may be chosen


def most_relevant_and_diverse(lists: Sequence[Candidates], k: int) -> list[list[int]]:
    """Return `k` positions for each list by maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998).

    The next one is always that of the largest (1 - diversity) * relevance - diversity * similarity. Relevance is the
    score between 0 and 1; similarity is the largest cosine between the item and those chosen before. All lists are
    chosen in one pass. A list has fewer than `k` where it has fewer candidates, or its limits allow no more.
    """
    row_B, most = np.arange(len(lists)), max(len(one.score_N) for one in lists)
    diversity_B1 = np.array([[one.diversity] for one in lists], np.float32)
    member_BMN = np.zeros((len(lists), max(len(one.most_M) for one in lists), most), bool)
    left_BM = np.ones(member_BMN.shape[:2], np.int64)
    open_BN, gain_BN = np.zeros((len(lists), most), bool), np.zeros((len(lists), most), np.float32)
    for row, one in enumerate(lists):
        open_BN[row, : len(one.score_N)] = True
        gain_BN[row, : len(one.score_N)] = _between_0_and_1(one.score_N)
        member_BMN[row, : len(one.most_M), : len(one.score_N)] = one.member_MN
        left_BM[row, : len(one.most_M)] = one.most_M
    relevance_BN, chosen = (1 - diversity_B1) * gain_BN, []
    diverse = diversity_B1.any()
    if diverse:
        unit_BND = pad_sequence([F.normalize(one.vector_ND, dim=1) for one in lists], batch_first=True).numpy()
        unit_BDN = np.ascontiguousarray(unit_BND.transpose(0, 2, 1))
        similarity_BN = np.full_like(gain_BN, -1)
    full_BM = left_BM <= 0
    for _ in range(k):
        if full_BM.any():
            open_BN &= ~(member_BMN & full_BM[:, :, None]).any(1)
        found_B = np.asarray(open_BN.any(1))
        if not found_B.any():
            break
        best_B = np.where(open_BN, gain_BN, -np.inf).argmax(1)
        chosen.append(np.where(found_B, best_B, -1))
        open_BN[row_B, best_B] = False
        hit_BM = member_BMN[row_B, :, best_B] & found_B[:, None]
        left_BM -= hit_BM
        full_BM = hit_BM & (left_BM <= 0)
        if diverse:
            cosine_BN = (unit_BND[row_B, best_B][:, None] @ unit_BDN)[:, 0]
            similarity_BN = np.maximum(similarity_BN, cosine_BN)
            gain_BN = relevance_BN - diversity_B1 * similarity_BN
    return [[place for place in own if place >= 0] for own in np.array(chosen, int).reshape(-1, len(lists)).T.tolist()]


def _between_0_and_1(score_N: Tensor) -> Tensor:
    if not len(score_N):
        return score_N
    return (score_N - score_N.min()) / (score_N.max() - score_N.min()).clamp(min=1e-12)


def explored(chosen: Sequence[int], number: int, share: float, draw: random.Random) -> list[int]:
    """Return a list in which each position, with probability `share`, holds a random candidate (epsilon-greedy).

    Args:
        chosen: candidates of the list, in its order.
        number: of candidates, 0 to number - 1; those outside the list are drawn, each at most once.
        share: probability that a position is given away.
        draw: source of chance.
    """
    others = sorted(set(range(number)) - set(chosen))
    draw.shuffle(others)
    return [others.pop() if others and draw.random() < share else candidate for candidate in chosen]
