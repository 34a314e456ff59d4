"""Item vectors that also read the words of the items' text: items with few events share what their words have learnt.

Shape suffixes, besides those of base.py: M words of an item, N distinct items, W their words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Catalogue, Options, SequenceModel

PRIOR = 10  # an item with this many training events keeps half of its own vector


@dataclass(frozen=True, kw_only=True)
class WordOptions(Options):
    """Options of models that can read the words of the items."""

    attribute_values: int = 0  # maximum number of words that are read of an item's text; words of one item do not count
    attributes: tuple[str, ...] = ()  # columns of the items table; default: the first three with text

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "attribute_values")
        if not self.attribute_values:
            self.check_unused("attribute_values is 0", "attributes")


class Words(nn.Module):
    """The vectors of an item's words, summed and divided by the square root of their number."""

    value_VM: Tensor

    def __init__(self, value_VM: Tensor, d_model: int) -> None:
        super().__init__()
        self.register_buffer("value_VM", value_VM, persistent=False)
        self.vectors = nn.Embedding(int(value_VM.max()) + 1, d_model, padding_idx=PAD)

    def forward(self, items: Tensor) -> Tensor:
        """Return the vectors (..., D) of `items` (...); 0 for items without words."""
        if torch.compiler.is_exporting():  # a graph cannot choose words, nor distinct items
            value_M = self.value_VM[items].long()
            number_1 = (value_M != PAD).sum(-1, keepdim=True).clamp(min=1)
            return self.vectors(value_M).sum(-2) * number_1.rsqrt()
        distinct_N, place = items.unique(return_inverse=True)
        value_NM = self.value_VM[distinct_N]
        word_NM = value_NM != PAD
        number_N1 = word_NM.sum(1, keepdim=True).clamp(min=1)
        word_WD = self.vectors(value_NM[word_NM].long())
        sum_ND = word_WD.new_zeros(len(distinct_N), word_WD.shape[1]).index_add(0, word_NM.nonzero()[:, 0], word_WD)
        return F.embedding(place, sum_ND * number_N1.rsqrt())


class ReadsWords(SequenceModel):
    """A model whose item vectors are those of a table `items`; with `attribute_values`, plus those of their words.

    Beside words, an item's own vector is scaled by n / (n + PRIOR) for n training events. What few events say of an
    item is mostly that it is not the target, so new items are known by their words alone.
    """

    items: nn.Embedding
    own_V: Tensor  # scale of each item's vector

    def __init__(self, options: Any, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.items = nn.Embedding(catalogue.num_items + 1 + options.masked, options.d_model, padding_idx=PAD)
        self.words = None
        if options.attribute_values:
            if catalogue.tokens is None:
                raise ValueError("attribute_values: the dataset has no text of items; set it to 0")
            value_VM = F.pad(catalogue.tokens["values"], (0, 0, 0, options.masked))  # MASK has none
            self.words = Words(value_VM, options.d_model)
            self.register_buffer("own_V", torch.ones(len(value_VM)))

    @classmethod
    def needs_of(cls, options: Any) -> frozenset[str]:
        return frozenset({"attributes"} if options.attribute_values else ())

    def on_start(self, count_V: Tensor) -> None:
        if self.words is not None:
            described_V = self.words.value_VM[: len(count_V), 0] != PAD
            self.own_V[: len(count_V)] = torch.where(described_V, count_V / (count_V + PRIOR), 1.0)

    def item_vectors(self) -> Tensor:
        size = self.catalogue.num_items + 1
        if self.words is not None:
            return self.embed(torch.arange(size, device=self.items.weight.device))
        return self.items.weight[:size] if self.options.masked else self.items.weight

    @classmethod
    def reads_rows(cls) -> bool:
        return True

    def vectors_of(self, items: Tensor, *, sparse: bool = False) -> Tensor:
        return self.embed(items)  # sparse if the table is

    def embed(self, items: Tensor) -> Tensor:
        """Return the vectors (..., D) of `items` (...): a vector of their own, plus that of their words."""
        x: Tensor = self.items(items)
        if self.words is None:
            return x
        words: Tensor = self.words(items)
        return x * self.own_V[items].unsqueeze(-1) + words
