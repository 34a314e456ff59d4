"""MF-BPR: matrix factorisation by Bayesian personalised ranking (Rendle et al., UAI 2009, arXiv:1205.2618).

The score of item i for user u is <w_u, h_i> + b_i; it does not depend on order or times of the past.

Differs from the paper in these places:
- the optimiser is that of the training settings; with `loss: bpr`, negatives are drawn from all items except the
  target, including other items of the user; regularisation is `weight_decay`, which leaves out the bias;
- unknown users have the zero vector, so that scores depend only on the bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqrec.models.base import PAD, Batch, Catalogue, Options, SequenceModel
from seqrec.models.layers import initialise


@dataclass(frozen=True, kw_only=True)
class MFBPROptions(Options):
    """Options of MF-BPR; `length` is the maximum number of targets in a user's window."""

    d_model: int = 64


class MFBPR(SequenceModel):
    """A vector per user and item."""

    Options = MFBPROptions
    options: MFBPROptions
    always_reads = frozenset({"user"})
    biased = True

    def __init__(self, options: MFBPROptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.users = nn.Embedding(catalogue.num_users + 1, options.d_model, padding_idx=0)
        self.items = nn.Embedding(catalogue.num_items + 1, options.d_model, padding_idx=PAD)
        self.bias = nn.Parameter(torch.zeros(catalogue.num_items + 1))
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        user_BD = self.users(batch.user)
        query_BD = torch.cat([user_BD, torch.ones_like(user_BD[:, :1])], -1)
        return query_BD.unsqueeze(1).expand(-1, 1 if last else batch.items.shape[1], -1)

    def item_vectors(self) -> Tensor:
        return torch.cat([self.items.weight, self.bias.unsqueeze(1)], 1)
