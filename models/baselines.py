"""The network of the baselines, which need no training by gradient: a score for each item, whatever the history.

Where the count term gives all of a baseline's scores, the network's are 0. The stage `baselines`
(seqrec/stages/baselines.py) computes the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqrec.models.base import Batch, Catalogue, Options, SequenceModel


class Constant(SequenceModel):
    """A score for each item, the same for every history: the popularity of the items, or 0 beside a count term."""

    biased = True
    score_V: Tensor

    def __init__(self, options: Options, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.register_buffer("score_V", torch.zeros(catalogue.num_items + 1))

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        query_BL1 = torch.ones_like(batch.items, dtype=torch.float32).unsqueeze(2)
        return query_BL1[:, -1:] if last else query_BL1

    def item_vectors(self) -> Tensor:
        return self.score_V.unsqueeze(1)
