"""HSTU: hierarchical sequential transduction units (Zhai et al., ICML 2024, arXiv:2402.17152).

Causal attention without a softmax: a weight is the SiLU of a score, divided by the length of the window, which keeps
the intensity of a user's interest. The attention output is normalised, gated by the query's event and added to it;
there is no feed-forward network. Scores include a bias by the distance of two events in positions, and with
`relative_time` also by their distance in time.

Differs from the paper's code in these places:
- time differences are between the events of query and key. With `request_time`, they are between the request and the
  key, as in the code, where the request comes at the time of the event to predict;
- queries have layer norm, and scores are inner products; the code normalises queries and items to unit length and
  divides by a temperature of 0.05;
- the loss is that of the training settings, by default full softmax, not sampled softmax with 128 negatives;
- positions count back from the most recent event; events have no ratings or other actions.

Shape suffixes, besides those of base.py and layers.py: Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, Options, SequenceModel, require
from seqrec.models.layers import (
    BUCKETS,
    INIT_STD,
    Dropout,
    asked_at,
    attention_bias,
    initialise,
    run_blocks,
    time_bucket,
)

NORM_EPS = 1e-6  # as in the paper's code; keeps the small outputs for short histories small


@dataclass(frozen=True, kw_only=True)
class HSTUOptions(Options):
    """Options of HSTU."""

    d_model: int = 64
    layers: int = 2
    heads: int = 2
    dropout: float = 0.2  # dropout of embeddings and of each layer's output
    relative_time: bool = False  # bias scores by the time between two events
    request_time: bool = False  # relative_time: count from the request, not from the event of the query

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "layers", "heads")
        require(
            self.d_model % self.heads == 0, f"heads: d_model {self.d_model} cannot be divided into {self.heads} heads"
        )
        require(self.relative_time or not self.request_time, "request_time: no effect without relative_time")

    @property
    def from_request(self) -> bool:
        return self.request_time


class Unit(nn.Module):
    """Pointwise attention with a gate (paper, eqs. 1 to 3)."""

    def __init__(self, options: HSTUOptions) -> None:
        super().__init__()
        d_model = options.d_model
        self.heads, self.length = options.heads, options.length
        self.norm = nn.LayerNorm(d_model, NORM_EPS, elementwise_affine=False)
        self.to_gate_and_query = nn.Linear(d_model, 2 * d_model, bias=False)
        self.to_key_and_value = nn.Linear(d_model, 2 * d_model, bias=False)
        self.by_distance = nn.Parameter(torch.empty(options.length).normal_(std=INIT_STD))
        self.by_time = nn.Parameter(torch.empty(BUCKETS + 1).normal_(std=INIT_STD)) if options.relative_time else None
        self.norm_mixed = nn.LayerNorm(d_model, NORM_EPS, elementwise_affine=False)
        self.dropout = Dropout(options.dropout)
        self.to_out = nn.Linear(d_model, d_model)

    def forward(self, x_BLD: Tensor, queries: slice, visible_BLL: Tensor, bucket_BLL: Tensor | None) -> Tensor:
        """Return the unit's output (B, Q, D) at the positions `queries`."""
        normed_BLD = self.norm(x_BLD)
        gate_BQD, q_BQD = F.silu(self.to_gate_and_query(normed_BLD[:, queries])).chunk(2, dim=-1)
        k_BLD, v_BLD = F.silu(self.to_key_and_value(normed_BLD)).chunk(2, dim=-1)
        q_BHQK, k_BHLK, v_BHLK = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q_BQD, k_BLD, v_BLD))
        score_BHQL = q_BHQK @ k_BHLK.mT + self.bias(x_BLD.shape[1], bucket_BLL)[:, queries].unsqueeze(1)
        weight_BHQL = F.silu(score_BHQL) / self.length * visible_BLL[:, queries].unsqueeze(1)
        mixed_BQD = (weight_BHQL @ v_BHLK).transpose(1, 2).flatten(2)
        return x_BLD[:, queries] + self.to_out(self.dropout(gate_BQD * self.norm_mixed(mixed_BQD)))

    def bias(self, length: int, bucket_BLL: Tensor | None) -> Tensor:
        """Return the bias of scores by positions and times: (B, L, L), or (1, L, L) without times."""
        position_L = torch.arange(length, device=self.by_distance.device)
        bias_1LL = self.by_distance[(position_L.unsqueeze(1) - position_L).clamp(min=0)].unsqueeze(0)
        if self.by_time is None or bucket_BLL is None:
            return bias_1LL
        return bias_1LL + F.embedding(bucket_BLL, self.by_time.unsqueeze(1)).squeeze(-1)


class HSTU(SequenceModel):
    """Pointwise causal attention over the user's most recent items."""

    Options = HSTUOptions
    options: HSTUOptions
    objectives = frozenset({"causal", "last"})

    def __init__(self, options: HSTUOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.items = nn.Embedding(catalogue.num_items + 1, options.d_model, padding_idx=PAD)
        self.positions = nn.Parameter(torch.empty(options.length, options.d_model).normal_(std=INIT_STD))
        self.dropout = Dropout(options.dropout)
        units = [Unit(options) for _ in range(options.layers)]
        self.units = nn.ModuleList(units)
        self.norm = nn.LayerNorm(options.d_model)
        initialise(self)
        for unit in units:
            nn.init.xavier_uniform_(unit.to_out.weight)

    @classmethod
    def needs_of(cls, options: Any) -> frozenset[str]:
        return frozenset({"times"} if options.relative_time else ())

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        length = batch.items.shape[1]
        visible_BLL = attention_bias(batch.items, causal=True) == 0
        bucket_BLL = None
        if self.options.relative_time:
            query_BL = asked_at(batch.times) if self.options.request_time else batch.times
            bucket_BLL = time_bucket(query_BL.unsqueeze(2) - batch.times.unsqueeze(1))
        x_BLD = self.items(batch.items) * self.options.d_model**0.5 + self.positions[-length:]
        x_BLD = self.dropout(x_BLD)
        return self.norm(run_blocks(self.units, x_BLD, visible_BLL, bucket_BLL, last=last))
