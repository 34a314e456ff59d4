"""BERT4Rec: bidirectional encoder representations for recommendation (Sun et al., CIKM 2019, arXiv:1904.06690).

Differs from the paper's code in these places:
- positions count back from the most recent event, so that padding cannot shift them;
- keys at padded positions are masked; by default, attention weights have no dropout (`attention_dropout`), so that a
  fused kernel can be used;
- every masked item becomes MASK, and masks are drawn in each epoch; the code repeats ten fixed draws;
- the softmax leaves out padding and MASK, which are not candidates.

Shape suffixes, besides those of base.py: Q query positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, Objective, SequenceModel
from seqrec.models.layers import AttentionOptions, Dropout, MultiHeadAttention, attention_bias, initialise, run_blocks


@dataclass(frozen=True, kw_only=True)
class BERT4RecOptions(AttentionOptions):
    """Options of BERT4Rec."""

    objective: Objective = "cloze"
    d_inner: int = 0  # width of the feed-forward networks; 0: 4 * d_model

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "d_inner")


class Block(nn.Module):
    """Attention and a feed-forward network, each followed by a residual connection and layer norm."""

    def __init__(self, options: BERT4RecOptions) -> None:
        super().__init__()
        d_model, d_inner = options.d_model, options.d_inner or 4 * options.d_model
        self.attention = MultiHeadAttention(d_model, options.heads, options.attention_dropout)
        self.norm_attention = nn.LayerNorm(d_model)
        self.inner = nn.Linear(d_model, d_inner)
        self.outer = nn.Linear(d_inner, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(options.dropout)

    def forward(self, x_BLD: Tensor, queries: slice, bias_BLL: Tensor) -> Tensor:
        """Return the block's output (B, Q, D) at the positions `queries`."""
        query_BQD = x_BLD[:, queries]
        mixed_BQD = self.attention(query_BQD, x_BLD, bias_BLL[:, queries])
        x_BQD = self.norm_attention(query_BQD + self.dropout(mixed_BQD))
        return self.norm(x_BQD + self.dropout(self.outer(F.gelu(self.inner(x_BQD)))))


class BERT4Rec(SequenceModel):
    """Bidirectional self-attention that fills in masked items."""

    Options = BERT4RecOptions
    options: BERT4RecOptions
    objectives = frozenset({"cloze"})
    biased = True
    reads_events = True

    def __init__(self, options: BERT4RecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        d_model = options.d_model
        self.items = nn.Embedding(catalogue.num_items + 2, d_model, padding_idx=PAD)  # the last row is MASK
        self.positions = nn.Parameter(torch.empty(options.length, d_model).normal_(std=0.02))
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.head = nn.Sequential(nn.Linear(d_model, d_model), nn.GELU(), nn.LayerNorm(d_model))
        self.bias = nn.Parameter(torch.zeros(catalogue.num_items + 1))
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        length = batch.items.shape[1]
        bias_BLL = attention_bias(batch.items, causal=False)
        x_BLD = self.dropout(self.norm(self.items(batch.items) + self.positions[-length:]))
        x_BLD = run_blocks(self.blocks, x_BLD, bias_BLL, last=last)
        query_BQD: Tensor = self.head(x_BLD)
        return torch.cat([query_BQD, torch.ones_like(query_BQD[..., :1])], -1)

    def item_vectors(self) -> Tensor:
        return torch.cat([self.items.weight[:-1], self.bias.unsqueeze(1)], 1)
