"""TiSASRec: time interval aware self-attention (Li, Wang and McAuley, WSDM 2020).

SASRec with keys and values that include positions and the time between two events. Differs from the paper in these
places:
- the unit of a user's intervals is the smallest gap up to the query, not that of the whole history, so that no position
  depends on later gaps. For the last position, which is used in serving, both are the same;
- gaps are taken within the window;
- there is no (L, L, D) tensor of interval embeddings: products of queries with all interval vectors are computed once
  and gathered, and weights are summed per interval before being multiplied with its value. The result is the same;
- each layer has its own tables of positions and intervals; the code shares them;
- the differences that sasrec.py lists apply as well.

Shape suffixes, besides those of base.py and layers.py: I interval, from 0 to max_interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, SequenceModel
from seqrec.models.layers import (
    INIT_STD,
    AttentionOptions,
    Dropout,
    MultiHeadAttention,
    attention_bias,
    initialise,
    run_blocks,
)
from seqrec.models.sasrec import Block


@dataclass(frozen=True, kw_only=True)
class TiSASRecOptions(AttentionOptions):
    """Options of TiSASRec."""

    max_interval: int = 256  # k of the paper: longer intervals are cut to this

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "max_interval")


def intervals(batch: Batch, longest: int) -> Tensor:
    """Return int64 (B, L, L): time between query and key in units of the user, rounded down, at most `longest`.

    The unit is the smallest non-zero gap among events up to the query (paper, section 3.2); without one, all are 0.
    """
    gap_BL = batch.times.diff(dim=1)
    real_BL = (batch.items[:, :-1] != PAD) & (gap_BL > 0)
    gap_BL = F.pad(gap_BL.masked_fill(~real_BL, float("inf")), (1, 0), value=float("inf"))
    length = gap_BL.shape[1]
    later_LL = torch.ones(length, length, dtype=torch.bool, device=gap_BL.device).triu(1)  # cummin cannot be exported
    unit_BL1 = gap_BL.unsqueeze(1).masked_fill(later_LL, float("inf")).amin(2, keepdim=True)
    between_BLL = (batch.times.unsqueeze(2) - batch.times.unsqueeze(1)).abs()
    return (between_BLL / unit_BL1).floor().clamp(max=longest).long()


class IntervalAttention(MultiHeadAttention):
    """Attention whose keys and values are sums of content, position and interval (paper, eqs. 5 to 8)."""

    def __init__(self, options: TiSASRecOptions) -> None:
        super().__init__(options.d_model, options.heads, options.attention_dropout)
        width = options.d_model // options.heads
        tables = (options.heads, options.length, width), (options.heads, options.max_interval + 1, width)
        self.position_key, self.interval_key = (nn.Parameter(torch.empty(t).normal_(std=INIT_STD)) for t in tables)
        self.position_value, self.interval_value = (nn.Parameter(torch.empty(t).normal_(std=INIT_STD)) for t in tables)

    def forward(
        self, query_BQD: Tensor, source_BLD: Tensor, bias_BQL: Tensor, interval_BQL: Tensor | None = None
    ) -> Tensor:
        """Return (B, Q, D): for each query, a mixture of the positions that it may attend to."""
        assert interval_BQL is not None
        q_BHQK, k_BHLK, v_BHLK = self.project(query_BQD, source_BLD)
        length = k_BHLK.shape[2]
        q_BHQK = q_BHQK * q_BHQK.shape[-1] ** -0.5
        index_BHQL = interval_BQL.unsqueeze(1).expand(-1, self.heads, -1, -1)
        by_interval_BHQI = q_BHQK @ self.interval_key.mT
        score_BHQL = q_BHQK @ (k_BHLK + self.position_key[:, -length:]).mT + by_interval_BHQI.gather(3, index_BHQL)
        weight_BHQL = self.weights(score_BHQL, bias_BQL)
        mass_BHQI = torch.zeros_like(by_interval_BHQI, dtype=weight_BHQL.dtype).scatter_add(3, index_BHQL, weight_BHQL)
        mixed_BHQK = weight_BHQL @ (v_BHLK + self.position_value[:, -length:]) + mass_BHQI @ self.interval_value
        return self.to_out(mixed_BHQK.transpose(1, 2).flatten(2))


class TiSASRec(SequenceModel):
    """Causal self-attention that knows the time between events."""

    Options = TiSASRecOptions
    options: TiSASRecOptions
    objectives = frozenset({"causal", "last"})
    always_reads = frozenset({"times"})
    reads_events = True

    def __init__(self, options: TiSASRecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.items = nn.Embedding(catalogue.num_items + 1, options.d_model, padding_idx=PAD)
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options, IntervalAttention(options)) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.d_model)
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        bias_BLL = attention_bias(batch.items, causal=True)
        interval_BLL = intervals(batch, self.options.max_interval)
        x_BLD = self.dropout(self.items(batch.items) * self.options.d_model**0.5)
        return self.norm(run_blocks(self.blocks, x_BLD, bias_BLL, interval_BLL, last=last))
