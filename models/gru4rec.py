"""GRU4Rec: session-based recommendations with recurrent networks (Hidasi et al., ICLR 2016, arXiv:1511.06939).

Differs from the paper in these places:
- the loss is that of the training settings, by default full softmax, not TOP1 or BPR against the other items of the
  batch;
- every position of a window has a target, and the state starts at zero in each window; there are no parallel sessions
  whose states are carried from batch to batch;
- the input embedding of items is also used for scoring (tied), not one-hot vectors and a separate output matrix;
- the state is projected to the width of the items, so that both widths can be chosen independently;
- `attribute_values` adds to each item's vector those of the words of its text.

Shape suffixes, besides those of base.py: G width of the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from seqrec.models.base import PAD, Batch, Catalogue
from seqrec.models.layers import Dropout, initialise
from seqrec.models.words import ReadsWords, WordOptions


@dataclass(frozen=True, kw_only=True)
class GRU4RecOptions(WordOptions):
    """Options of GRU4Rec."""

    d_model: int = 64  # width of item vectors
    d_state: int = 128  # width of the recurrent state
    layers: int = 1
    dropout: float = 0.2  # dropout of embeddings and of each layer's states
    item_bias: bool = False  # add a bias per item to the scores

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "d_state", "layers")


def roll(x_BLD: Tensor, shift_B: Tensor) -> Tensor:
    """Return each row rolled to the left by its entry of `shift_B`, at most by the row's length."""
    length = x_BLD.shape[1]
    index_BL = torch.arange(length, device=x_BLD.device) + shift_B.unsqueeze(1)
    index_BL = torch.where(index_BL < 0, index_BL + length, torch.where(index_BL < length, index_BL, index_BL - length))
    return x_BLD[torch.arange(x_BLD.shape[0], device=x_BLD.device).unsqueeze(1), index_BL]


class GRU4Rec(ReadsWords):
    """Gated recurrent units over the user's most recent items."""

    Options = GRU4RecOptions
    options: GRU4RecOptions
    objectives = frozenset({"causal", "last"})

    def __init__(self, options: GRU4RecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.biased = options.item_bias
        self.bias = nn.Parameter(torch.zeros(catalogue.num_items + 1)) if options.item_bias else None
        widths = [options.d_model] + [options.d_state] * options.layers
        self.layers = nn.ModuleList(nn.GRU(before, after, batch_first=True) for before, after in pairwise(widths))
        self.dropout = Dropout(options.dropout)
        self.to_query = nn.Linear(options.d_state, options.d_model)
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        real_BL = batch.items != PAD
        padding_B = (~real_BL).sum(1)
        x_BLD = self.dropout(self.embed(batch.items) * self.options.d_model**0.5)
        state_BLG = roll(x_BLD, padding_B)  # moves padding to the end, so that the state is zero where a history begins
        for layer in self.layers:
            # an exported graph needs the start, with a size that it can trace
            start_1BG = state_BLG.new_zeros(1, state_BLG.shape[0], self.options.d_state)
            state_BLG = self.dropout(layer(state_BLG, start_1BG)[0])
        state_BLG = roll(state_BLG, -padding_B) * real_BL.unsqueeze(-1)
        query_BPD: Tensor = self.to_query(state_BLG[:, -1:] if last else state_BLG)
        return query_BPD if self.bias is None else torch.cat([query_BPD, torch.ones_like(query_BPD[..., :1])], -1)

    def item_vectors(self) -> Tensor:
        item_VD = super().item_vectors()
        return item_VD if self.bias is None else torch.cat([item_VD, self.bias.unsqueeze(1)], 1)

    def vectors_of(self, items: Tensor, *, sparse: bool = False) -> Tensor:
        vectors = super().vectors_of(items, sparse=sparse)
        return vectors if self.bias is None else torch.cat([vectors, self.bias[items].unsqueeze(-1)], -1)
