"""Blocks shared by two or more models.

Shape suffixes, besides those of base.py: H heads, K width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.base import PAD

INIT_STD = 0.02  # N(0, 1) embeddings make a softmax over thousands of items start saturated


def initialise(module: nn.Module) -> None:
    """Set linear and embedding weights to N(0, 0.02), biases and the padding row to zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=INIT_STD)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=INIT_STD)
            if part.padding_idx is not None:
                with torch.no_grad():
                    part.weight[part.padding_idx].zero_()


def visibility(items_BL: Tensor, *, causal: bool) -> Tensor:
    """Return (B, L, L) bool: may the query of a row read the key of a column?

    Padding is no key. A padded query reads itself alone, since a softmax over nothing is NaN.
    """
    length = items_BL.shape[1]
    visible_BLL = (items_BL != PAD).unsqueeze(1).expand(-1, length, -1)
    if causal:
        visible_BLL = visible_BLL & torch.ones(length, length, dtype=torch.bool, device=items_BL.device).tril()
    return visible_BLL | torch.eye(length, dtype=torch.bool, device=items_BL.device)


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention with `heads` heads (Vaswani et al. 2017)."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        if d_model % heads:
            raise ValueError(f"heads: d_model {d_model} cannot be divided into {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.to_query = nn.Linear(d_model, d_model)
        self.to_key = nn.Linear(d_model, d_model)
        self.to_value = nn.Linear(d_model, d_model)
        self.to_out = nn.Linear(d_model, d_model)

    def forward(self, query_BQD: Tensor, source_BLD: Tensor, visible_BQL: Tensor) -> Tensor:
        """Return (B, Q, D): each query's mixture of the positions it may see."""
        q_BHQK, k_BHLK, v_BHLK = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in (self.to_query(query_BQD), self.to_key(source_BLD), self.to_value(source_BLD))
        )
        mixed_BHQK = F.scaled_dot_product_attention(
            q_BHQK,
            k_BHLK,
            v_BHLK,
            attn_mask=visible_BQL.unsqueeze(1),
            dropout_p=self.dropout if self.training else 0.0,
        )
        out: Tensor = self.to_out(mixed_BHQK.transpose(1, 2).flatten(2))
        return out
