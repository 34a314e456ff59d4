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


def attention_bias(items_BL: Tensor, *, causal: bool) -> Tensor:
    """Return (B, L, L): 0 where the query of a row may read the key of a column, else -inf.

    Padding is no key. A padded query reads itself alone, since a softmax over nothing is NaN.
    """
    length = items_BL.shape[1]
    visible_BLL = (items_BL != PAD).unsqueeze(1).expand(-1, length, -1)
    if causal:
        visible_BLL = visible_BLL & torch.ones(length, length, dtype=torch.bool, device=items_BL.device).tril()
    visible_BLL = visible_BLL | torch.eye(length, dtype=torch.bool, device=items_BL.device)
    return torch.zeros(visible_BLL.shape, device=items_BL.device).masked_fill(~visible_BLL, float("-inf"))


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

    def forward(self, query_BQD: Tensor, source_BLD: Tensor, bias_BQL: Tensor) -> Tensor:
        """Return (B, Q, D): each query's mixture of the positions it may see."""
        q_BHQK, k_BHLK, v_BHLK = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in (self.to_query(query_BQD), self.to_key(source_BLD), self.to_value(source_BLD))
        )
        mixed_BHQK = F.scaled_dot_product_attention(
            q_BHQK,
            k_BHLK,
            v_BHLK,
            attn_mask=bias_BQL.unsqueeze(1),
            dropout_p=self.dropout if self.training else 0.0,
        )
        out: Tensor = self.to_out(mixed_BHQK.transpose(1, 2).flatten(2))
        return out
