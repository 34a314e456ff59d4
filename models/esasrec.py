"""eSASRec: SASRec with LiGR blocks (Tikhonovich et al., RecSys 2025, arXiv:2508.06450).

The blocks are those of LiGR (Borisyuk et al. 2025, arXiv:2502.03417): each branch reads the normalised input and is
added through a sigmoid gate, computed from the unnormalised input. The feed-forward network is a SwiGLU (Shazeer 2020,
arXiv:2002.05202). Item vectors are read as they are, as in the public code, without SASRec's factor sqrt(d_model).

Differs from the public code in these places:
- the last block's output is normalised, as in SASRec; the code uses it without normalisation;
- with `loss: sampled_ce` and 256 negatives, all targets of a step share the negatives, and scores have the logQ
  correction; the code draws 256 negatives per target, without correction;
- positions, padding, initialisation and attention dropout are as described in sasrec.py.

Shape suffixes, besides those of base.py: Q queries, E expanded width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import Catalogue
from seqrec.models.layers import Dropout, MultiHeadAttention, initialise
from seqrec.models.sasrec import SASRec, SASRecOptions


@dataclass(frozen=True, kw_only=True)
class ESASRecOptions(SASRecOptions):
    """Options of eSASRec."""

    expansion: int = 4  # width of the feed-forward network as a multiple of d_model

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "expansion")


class LiGRBlock(nn.Module):
    """Attention and SwiGLU, each with layer norm before it and a gate after it."""

    def __init__(self, options: ESASRecOptions) -> None:
        super().__init__()
        d_model, d_inner = options.d_model, options.expansion * options.d_model
        self.norm_attention = nn.LayerNorm(d_model)
        self.attention = MultiHeadAttention(d_model, options.heads, options.attention_dropout)
        self.gate_attention = nn.Linear(d_model, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.inner = nn.Linear(d_model, 2 * d_inner, bias=False)  # gate and value of the SwiGLU
        self.outer = nn.Linear(d_inner, d_model, bias=False)
        self.gate = nn.Linear(d_model, d_model)
        self.dropout = Dropout(options.dropout)

    def forward(self, x_BLD: Tensor, queries: slice, bias_BLL: Tensor) -> Tensor:
        """Return the block's output (B, Q, D) at the positions `queries`."""
        normed_BLD = self.norm_attention(x_BLD)
        x_BQD = x_BLD[:, queries]
        mixed_BQD = self.attention(normed_BLD[:, queries], normed_BLD, bias_BLL[:, queries])
        x_BQD = x_BQD + self.gate_attention(x_BQD).sigmoid() * self.dropout(mixed_BQD)
        squashed_BQE, linear_BQE = self.inner(self.norm(x_BQD)).chunk(2, dim=-1)
        inner_BQE = self.dropout(F.silu(squashed_BQE) * linear_BQE)
        return x_BQD + self.gate(x_BQD).sigmoid() * self.dropout(self.outer(inner_BQE))


class ESASRec(SASRec):
    """SASRec with LiGR blocks."""

    Options = ESASRecOptions
    options: ESASRecOptions

    def __init__(self, options: ESASRecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.blocks = nn.ModuleList(LiGRBlock(options) for _ in range(options.layers))
        self.scale = 1.0
        initialise(self)
