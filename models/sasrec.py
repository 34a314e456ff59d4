"""SASRec: self-attentive sequential recommendation (Kang and McAuley, ICDM 2018, arXiv:1808.09781).

Differs from the paper's code in these places:
- positions count back from the most recent event, so that padding cannot shift them;
- keys at padded positions are masked; attention has an output projection, as in most re-implementations;
- by default, attention weights have no dropout (`attention_dropout`), so that a fused kernel can be used;
- the loss is that of the training settings, by default full softmax, not binary cross-entropy with one negative;
- `attribute_values` adds to each item's vector those of the words of its text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqrec.models.base import Batch, Catalogue
from seqrec.models.layers import AttentionOptions, Dropout, MultiHeadAttention, attention_bias, initialise, run_blocks
from seqrec.models.words import ReadsWords, WordOptions


@dataclass(frozen=True, kw_only=True)
class SASRecOptions(AttentionOptions, WordOptions):
    """Options of SASRec."""


class Block(nn.Module):
    """Attention with normalised queries, then a point-wise network (paper, section 3.2)."""

    def __init__(self, options: AttentionOptions, attention: nn.Module | None = None) -> None:
        super().__init__()
        width = options.block_width
        self.norm_query = nn.LayerNorm(width)
        self.attention = attention or MultiHeadAttention(width, options.heads, options.attention_dropout)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.dropout = Dropout(options.dropout)

    def forward(self, x_BLD: Tensor, queries: slice, bias_BLL: Tensor, *pairs_BLL: Tensor) -> Tensor:
        """Return the block's output at the positions `queries`; `pairs_BLL` are further inputs of its attention."""
        query_BQD = self.norm_query(x_BLD[:, queries])
        pairs_BQL = (pair_BLL[:, queries] for pair_BLL in pairs_BLL)
        x_BQD = query_BQD + self.attention(query_BQD, x_BLD, bias_BLL[:, queries], *pairs_BQL)
        x_BQD = self.norm(x_BQD)
        return x_BQD + self.dropout(self.outer(self.dropout(torch.relu(self.inner(x_BQD)))))


class SASRec(ReadsWords):
    """Causal self-attention over the user's most recent items."""

    Options = SASRecOptions
    options: SASRecOptions
    objectives = frozenset({"causal", "last"})
    reads_events = True

    def __init__(self, options: SASRecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.positions = nn.Parameter(torch.empty(options.length, options.d_model).normal_(std=0.02))
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.d_model)
        self.scale = options.d_model**0.5  # of item vectors in a history
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        length = batch.items.shape[1]
        bias_BLL = attention_bias(batch.items, causal=True)
        x_BLD = self.embed(batch.items) * self.scale + self.positions[-length:]
        x_BLD = self.dropout(x_BLD)
        return self.norm(run_blocks(self.blocks, x_BLD, bias_BLL, last=last))
