"""Networks of the baselines, which need no training by gradient: scores that no history changes, and EASE.

The baselines that count which item follows which have no network: the count term gives all of their scores. The stage
`baselines` (seqrec/stages/baselines.py) computes the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqrec.models.base import Batch, Catalogue, Options, SequenceModel


@dataclass(frozen=True, kw_only=True)
class BaselineOptions(Options):
    """Options of a baseline; `length` is the number of recent events that it reads."""


class Baseline(SequenceModel):
    """A model whose values are computed, and never trained."""

    Options = BaselineOptions
    options: BaselineOptions

    def phases(self, stage: str) -> tuple[str, ...]:
        """See `SequenceModel.phases`."""
        return ()


class Constant(Baseline):
    """A score for each item, the same for every history: the popularity of the items, or 0 beside a count term."""

    biased = True
    score_V: Tensor

    def __init__(self, options: BaselineOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.register_buffer("score_V", torch.zeros(catalogue.num_items + 1))

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """See `SequenceModel.forward`."""
        query_BL1 = torch.ones_like(batch.items, dtype=torch.float32).unsqueeze(2)
        return query_BL1[:, -1:] if last else query_BL1

    def item_vectors(self) -> Tensor:
        """See `SequenceModel.item_vectors`."""
        return self.score_V.unsqueeze(1)


class EASE(Baseline):
    """The best linear map from the items of a history to these items (Steck, WWW 2019, arXiv:1905.03375).

    The query says which items the history holds; the vector of an item holds its weights, a column of B.
    """

    weight_VV: Tensor

    def __init__(self, options: BaselineOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        size = catalogue.num_items + 1
        self.register_buffer("weight_VV", torch.zeros(size, size))

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """See `SequenceModel.forward`."""
        if last:
            held_BV = self.weight_VV.new_zeros(batch.items.shape[0], self.weight_VV.shape[0])
            return held_BV.scatter(1, batch.items, 1.0).unsqueeze(1)
        held_BLV: Any = F.one_hot(batch.items, len(self.weight_VV)).to(self.weight_VV)
        seen_BLV: Tensor = held_BLV.cummax(1).values
        return seen_BLV

    def item_vectors(self) -> Tensor:
        """See `SequenceModel.item_vectors`."""
        return self.weight_VV
