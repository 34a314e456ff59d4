"""Rules of what may be shown: filters, boosts and quotas by the attributes of items, and diverse lists.

Shape suffixes: V items, padding included; N candidates of one list; M limits of one list; D width of an item vector.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from seqrec.artifacts import read_table

MOST_BOOST = 50.0  # logarithm of the largest product of factors
TEXT = (pa.string(), pa.large_string())
SEPARATORS = re.compile(r"[,|]")  # between the values of one attribute, as in "Comedy, Drama"


@dataclass(frozen=True)
class NumberRange:
    """A condition on a number: at least `min`, at most `max`."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (pydantic reads this name)

    min: float | None = None
    max: float | None = None


Condition = list[str] | NumberRange  # one of these values; or a number within the range
Filter = Mapping[str, Condition]  # attribute -> condition; an item must meet all of them
Boost = Mapping[str, Mapping[str, float]]  # attribute -> value -> how many times as likely its items are to be
Quota = Mapping[str, Mapping[str, int]]  # attribute -> value -> items of a list that may have it
Items = NDArray[np.int64]  # numbers of items
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
NONE = np.zeros(0, np.int64)  # no items


class Attribute:
    """The values of one attribute, of item 1, 2, ...; None where an item has none."""

    def __init__(self, values: Sequence[str | None]) -> None:
        self.values = values

    @cached_property
    def _items(self) -> dict[str, Items]:
        """The numbers of the items that have a value, by the value in lower case."""
        found: dict[str, list[int]] = {}
        for item, text in enumerate(self.values, start=1):
            whole = (text or "").casefold()
            for value in {whole, *SEPARATORS.split(whole)}:
                found.setdefault(value.strip(), []).append(item)
        found.pop("", None)
        return {value: np.array(items) for value, items in found.items()}

    def having(self, value: str) -> Items:
        """Return the numbers of the items that have a value."""
        return self._items.get(value.strip().casefold(), NONE)

    @cached_property
    def by_frequency(self) -> list[str]:
        """The values, those that most items have first."""
        texts = [text for text in self.values if text]
        count = Counter(value for text in texts for value in {value.strip() for value in SEPARATORS.split(text)})
        count.pop("", None)
        return sorted(count, key=lambda value: (-count[value], value))

    @cached_property
    def _numbers(self) -> NDArray[np.float64]:
        """The values (V,) as numbers, NaN where they are none."""
        return np.array([np.nan, *map(_number, self.values)])

    def meets(self, condition: Condition) -> Mask:
        """Return which items (V,) meet a condition; one without a value meets none."""
        if not isinstance(condition, NumberRange):
            meets_V = np.zeros(1 + len(self.values), bool)
            for value in set(condition):
                meets_V[self.having(value)] = True
            return meets_V
        meets_V = ~np.isnan(self._numbers)
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
    def read(cls, items: Path | str, item_ids: Sequence[str]) -> Attributes:
        """Read the items table that `ingest` wrote.

        Args:
            items: the table: `item_id`, `title`, and any attributes.
            item_ids: ids of items 1, 2, ...; an item that the table lacks has no values.

        Raises:
            ValueError: the table has no item_id, or a column that is not text.
        """
        table = read_table(Path(items))
        kinds = {field.name: field.type for field in table.schema}
        wrong = [f"{name} is {kind}" for name, kind in ({"item_id": "missing"} | kinds).items() if kind not in TEXT]
        if wrong:
            raise ValueError(
                f"items: {items} is not a table that `ingest` wrote, whose columns are item_id and others, all of them "
                f"text: {', '.join(wrong)}"
            )
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
            known = ", ".join(sorted(self)) or "none: set serve --items, or Recommender.attributes"
            raise ValueError(f"{rule}: attribute {name!r} is unknown; known: {known}")

    def log_factors(self, boost: Boost, size: int) -> Floats:
        """Return (V,): for each of `size` items, padding included, the sum of the logarithms of its factors.

        A sum is from -MOST_BOOST to MOST_BOOST, so that every product and every score is finite.
        """
        log_V = np.zeros(size, np.float32)
        for name, values in boost.items():
            for value, factor in values.items():
                log_V[self[name].having(value)] += math.log(factor)
        return log_V.clip(-MOST_BOOST, MOST_BOOST)

    def limits(self, quota: Quota, item_N: Items) -> tuple[Mask, Items]:
        """Return which of the items have each value of a quota (M, N), and how many of them may be chosen (M,)."""
        values = [(name, value) for name, own in quota.items() for value in own]
        member_MN = np.zeros((len(values), len(item_N)), bool)
        for row, (name, value) in enumerate(values):
            member_MN[row] = self[name].meets([value])[item_N]
        most = [min(quota[name][value], len(item_N)) for name, value in values]  # any integer may be asked for
        return member_MN, np.array(most, np.int64)


def most_relevant_and_diverse(
    score_N: Floats,
    vector_ND: Floats,
    k: int,
    diversity: float,
    limits: tuple[Mask, Items] | None = None,
) -> list[int]:
    """Choose `k` candidates by maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998).

    The next one is always that of the largest (1 - diversity) * relevance - diversity * similarity. Relevance is the
    score between 0 and 1; similarity is the largest cosine between the item and those chosen before. There are fewer
    than `k` if there are fewer candidates, or if the limits (see `Attributes.limits`; an item may be under several)
    allow no more. Scores must be finite.
    """
    relevance_N = (1 - diversity) * _between_0_and_1(score_N)
    unit_ND = unit(vector_ND)
    gain_N, similarity_N = relevance_N, np.full_like(relevance_N, -1)
    open_N = np.ones(len(score_N), bool)
    member_MN, left_M = limits or (np.zeros((0, len(score_N)), bool), NONE)
    full_M, chosen = left_M <= 0, list[int]()
    while len(chosen) < k:
        if full_M.any():
            open_N &= ~member_MN[full_M].any(0)
        if not open_N.any():
            break
        best = int(np.where(open_N, gain_N, -np.inf).argmax())
        chosen.append(best)
        open_N[best] = False
        left_M = left_M - member_MN[:, best]
        full_M = member_MN[:, best] & (left_M <= 0)
        if diversity:
            similarity_N = np.maximum(similarity_N, unit_ND @ unit_ND[best])
            gain_N = relevance_N - diversity * similarity_N
    return chosen


def unit(vector_ND: Floats) -> Floats:
    """Return vectors of length 1 in the same directions; 0 stays 0."""
    return vector_ND / np.maximum(np.linalg.norm(vector_ND, axis=1, keepdims=True), 1e-12)


def _between_0_and_1(score_N: Floats) -> Floats:
    if not len(score_N):
        return score_N
    return (score_N - score_N.min()) / np.maximum(score_N.max() - score_N.min(), 1e-12)


def explored(chosen: Sequence[int], number: int, share: float, draw: random.Random) -> list[int]:
    """Return a list in which each position, with probability `share`, holds a random candidate (epsilon-greedy).

    Of the candidates 0 to `number` - 1, those outside the list are drawn, each at most once.
    """
    others = sorted(set(range(number)) - set(chosen))
    draw.shuffle(others)
    return [others.pop() if others and draw.random() < share else candidate for candidate in chosen]
