"""Blocks shared by two or more models.

Shape suffixes, besides those of base.py: H heads, K width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.attention_weights import keep
from seqrec.models.base import PAD, Options, require

BUCKETS = 128  # number of the last, open-ended bucket of time differences; the first is 0
BUCKET_WIDTH = 0.301  # width of a bucket, in the natural logarithm of seconds
INIT_STD = 0.02  # with N(0, 1) embeddings, a softmax over thousands of items would start saturated


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(Options):
    """Options that the models with `MultiHeadAttention` share."""

    d_model: int = 64
    layers: int = 2
    heads: int = 2
    dropout: float = 0.2  # dropout of embeddings and point-wise networks
    attention_dropout: float = 0.0  # dropout of attention weights; above 0, the fused kernel is not used

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "layers", "heads")
        width, heads = self.block_width, self.heads
        require(width % heads == 0, f"heads: a width of {width} cannot be divided into {heads} heads")

    @property
    def block_width(self) -> int:
        """Width of a block, which its heads share."""
        return self.d_model


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
    """Return (B, L, L): 0 where a query (row) may attend to a key (column), else -inf.

    Padding is never a key. Padded queries attend to themselves, because a softmax over nothing is NaN.
    """
    length, device = items_BL.shape[1], items_BL.device
    none_LL = torch.full((length, length), float("-inf"), device=device)
    pad_LL = none_LL.masked_fill(torch.eye(length, dtype=torch.bool, device=device), 0)  # where the key is padding
    event_LL = none_LL.triu(1) if causal else torch.zeros_like(none_LL)
    return torch.where((items_BL == PAD).unsqueeze(1), pad_LL, event_LL)  # one pass over (B, L, L)


def time_bucket(seconds: Tensor) -> Tensor:
    """Return the logarithmic bucket, 0 to `BUCKETS`, of each time difference, as int64."""
    return (seconds.abs().clamp(min=1).log() / BUCKET_WIDTH).long().clamp(max=BUCKETS)


def asked_at(times_BL: Tensor) -> Tensor:
    """Return (B, L): when each position is asked for the next event, from times relative to the request.

    That is the time of the next event, and of the request at the last position. In training, the request comes at the
    time of the last target.
    """
    return F.pad(times_BL[:, 1:], (0, 1))


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Return scaled dot-product attention; on a CPU in fp32, because bf16 triples the time of the backward pass."""
    if bias is not None and (bias.dtype, query.dtype) == (torch.float32, torch.float64):
        bias = bias.double()  # with a mask of another type, torch's kernel for AVX2 is wrong
    keep(lambda: _weights(query, key, bias))
    if query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    with torch.autocast("cpu", enabled=False):
        query, key, value = query.float(), key.float(), value.float()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)


def _weights(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    logits = query @ key.mT * query.shape[-1] ** -0.5
    if bias is not None:
        logits = logits.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else logits + bias
    return logits.softmax(-1)


def draws(x: Tensor) -> Tensor:
    """Return uniform random int16 values in the shape of `x`; one 64-bit draw gives four of them."""
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    return bits.view(torch.int16)[: x.numel()].view(x.shape)


class Dropout(nn.Module):
    """Inverted dropout; on a CPU with 16-bit draws, five times as fast as torch's.

    The probability is rounded to a multiple of 2^-16, and the scale is that of the rounded probability.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with random entries dropped in training mode, otherwise unchanged."""
        if not self.training or self.p == 0 or x.is_cuda:
            return F.dropout(x, self.p, self.training)
        dropped = min(round(self.p * 65536), 65535)
        kept = draws(x) >= dropped - 32768
        return x * kept.to(x.dtype).mul_(65536 / (65536 - dropped))


def run_blocks(blocks: nn.ModuleList, x_BLD: Tensor, *others: Tensor | None, last: bool = False) -> Tensor:
    """Return the output (B, L, D) of the last block, or with `last` only its last position (B, 1, D).

    The other blocks compute all positions, because the last block reads them. Each block is called with its input, the
    positions to compute, and `others`.
    """
    *earlier, final = blocks
    for block in earlier:
        x_BLD = block(x_BLD, slice(None), *others)
    return final(x_BLD, slice(-1, None) if last else slice(None), *others)


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention with `heads` heads (Vaswani et al. 2017)."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.to_query = nn.Linear(d_model, d_model)
        self.to_key = nn.Linear(d_model, d_model)
        self.to_value = nn.Linear(d_model, d_model)
        self.to_out = nn.Linear(d_model, d_model)
        self.weigh: nn.Module | None = None  # replaces the softmax; disables the fused kernel

    def forward(self, query_BQD: Tensor, source_BLD: Tensor, bias_BQL: Tensor) -> Tensor:
        """Return (B, Q, D): for each query, a mixture of the positions that it may attend to."""
        q_BHQK, k_BHLK, v_BHLK = self.project(query_BQD, source_BLD)
        if self.weigh is None:
            mixed_BHQK = attend(q_BHQK, k_BHLK, v_BHLK, bias_BQL.unsqueeze(1), self.dropout if self.training else 0.0)
        else:
            scaled_BHQK = q_BHQK * q_BHQK.shape[-1] ** -0.5
            mixed_BHQK = self.weights(scaled_BHQK @ k_BHLK.mT, bias_BQL) @ v_BHLK
        return self.to_out(mixed_BHQK.transpose(1, 2).flatten(2))

    def project(self, query_BQD: Tensor, source_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, Q, K), keys and values (B, H, L, K)."""
        parts = (self.to_query(query_BQD), self.to_key(source_BLD), self.to_value(source_BLD))
        q_BHQK, k_BHLK, v_BHLK = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in parts)
        return q_BHQK, k_BHLK, v_BHLK

    def weights(self, score_BHQL: Tensor, bias_BQL: Tensor) -> Tensor:
        """Return the attention weights (B, H, Q, L), without fused kernels: for `weigh` and for second derivatives."""
        score_BHQL = score_BHQL + bias_BQL.unsqueeze(1)
        weight_BHQL = score_BHQL.softmax(-1) if self.weigh is None else self.weigh(score_BHQL)
        weight_BHQL = F.dropout(weight_BHQL, self.dropout, self.training)
        keep(lambda: weight_BHQL)
        return weight_BHQL
