"""FPMC: factorised personalised Markov chains (Rendle et al., WWW 2010).

The score of item i for user u after item j is <v_u^UI, v_i^IU> + <v_j^LI, v_i^IL>: the user's preference for i plus
the transition from the last item. The term <v_u^UL, v_j^LU> does not depend on i, so it does not affect rankings.

Differs from the paper in these places:
- a basket is one item;
- the optimiser is that of the training settings; with `loss: bpr`, negatives are drawn from all items except the
  target, including other items of the user;
- unknown users have the zero vector, so that scores depend only on the last item.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqrec.models.base import PAD, Batch, Catalogue, Options, SequenceModel
from seqrec.models.layers import initialise


@dataclass(frozen=True, kw_only=True)
class FPMCOptions(Options):
    """Options of FPMC."""

    d_model: int = 64  # number of factors of each term


class FPMC(SequenceModel):
    """A factorised tensor over user, last item and next item."""

    Options = FPMCOptions
    options: FPMCOptions
    always_reads = frozenset({"user"})

    def __init__(self, options: FPMCOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.users = nn.Embedding(catalogue.num_users + 1, options.d_model, padding_idx=0)  # v^UI
        self.last_items = nn.Embedding(catalogue.num_items + 1, options.d_model, padding_idx=PAD)  # v^LI
        self.next_items = nn.Embedding(catalogue.num_items + 1, 2 * options.d_model, padding_idx=PAD)  # [v^IU, v^IL]
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        last_BPD = self.last_items(batch.items[:, -1:] if last else batch.items)
        return torch.cat([self.users(batch.user).unsqueeze(1).expand_as(last_BPD), last_BPD], -1)

    def item_vectors(self) -> Tensor:
        return self.next_items.weight
