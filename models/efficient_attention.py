"""Cheaper attention: alternatives in the backbone of STRec, for comparison.

Each module takes the rows of a layer as queries and keys and returns all rows; attention is bidirectional. The first
three never form the L x L matrix. The others compute what their paper defines, but with that matrix or a chunk as long
as most histories: they show what such attention is worth, not what it costs.

Shape suffixes, besides those of base.py: H heads, K width of a head, R projected rows, U chosen queries, S sampled
keys, C chunks, W positions of a chunk, J keys of a chunk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EfficientAttention(nn.Module):
    """Input and output projections around `mix`, which subclasses define."""

    def __init__(self, d_model: int, heads: int, length: int, size: int) -> None:
        super().__init__()
        self.heads, self.length, self.size = heads, length, size
        self.to_query_key_value = nn.Linear(d_model, 3 * d_model)
        self.to_out = nn.Linear(d_model, d_model)

    def forward(self, query_BLD: Tensor, source_BLD: Tensor, visible_B11L: Tensor | None) -> Tensor:
        """Return (B, L, D); `source_BLD` must be `query_BLD`; `visible_B11L` is False at padding, None without."""
        assert query_BLD.shape == source_BLD.shape, "these drop-ins compute every row"
        projected = self.to_query_key_value(source_BLD).unflatten(-1, (3, self.heads, -1))
        q_BHLK, k_BHLK, v_BHLK = projected.permute(2, 0, 3, 1, 4).unbind()
        mixed_BHLK = self.mix(q_BHLK, k_BHLK, v_BHLK, visible_B11L)
        return self.to_out(mixed_BHLK.transpose(1, 2).flatten(2))

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, visible_B11L: Tensor | None) -> Tensor:
        """Return a mixture of values for each query (B, H, L, K)."""
        raise NotImplementedError


class LinformerAttention(EfficientAttention):
    """Keys and values projected along the sequence to `size` rows (Wang et al. 2020, arXiv:2006.04768).

    Keys, values and heads share one projection, to which padding does not contribute. Short sequences use the weights
    of the most recent positions.
    """

    def __init__(self, d_model: int, heads: int, length: int, size: int) -> None:
        super().__init__(d_model, heads, length, size)
        self.projection = nn.Parameter(torch.empty(size, length).normal_(std=length**-0.5))

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, visible_B11L: Tensor | None) -> Tensor:
        projection_RL = self.projection[:, -q_BHLK.shape[2] :]
        if visible_B11L is not None:
            projection_RL = projection_RL * visible_B11L.to(projection_RL.dtype)
        return F.scaled_dot_product_attention(q_BHLK, projection_RL @ k_BHLK, projection_RL @ v_BHLK)


class InformerAttention(EfficientAttention):
    """ProbSparse attention (Zhou et al., AAAI 2021, arXiv:2012.07436): a few queries attend, the others get the mean.

    A query's peakedness is the maximum minus the mean of its logits on ceil(size ln L) sampled keys. The most peaked
    queries, equally many, attend to all keys. The sampled keys are drawn once and are the same for all queries; they
    include the last event, which every sequence has.
    """

    order: Tensor  # (length,) positions, counted back from the last event, in the order of sampling

    def __init__(self, d_model: int, heads: int, length: int, size: int) -> None:
        super().__init__(d_model, heads, length, size)
        others = 1 + torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))
        self.register_buffer("order", F.pad(others, (1, 0)), persistent=False)

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, visible_B11L: Tensor | None) -> Tensor:
        length = q_BHLK.shape[2]
        number = min(length, math.ceil(self.size * math.log(max(2, length))))
        sampled_S = length - 1 - self.order[self.order < length][:number]
        logits_BHLS = q_BHLK @ k_BHLK[:, :, sampled_S].mT
        if visible_B11L is None:
            peakedness_BHL = logits_BHLS.amax(-1) - logits_BHLS.mean(-1)
            mean_BH1K = v_BHLK.mean(2, keepdim=True)
        else:
            counted_B11S = visible_B11L[..., sampled_S]
            mean_BHL = (logits_BHLS * counted_B11S).sum(-1) / counted_B11S.sum(-1)
            peakedness_BHL = logits_BHLS.masked_fill(~counted_B11S, float("-inf")).amax(-1) - mean_BHL
            peakedness_BHL = peakedness_BHL.masked_fill(~visible_B11L[:, :, 0], float("-inf"))
            visible_B1L1 = visible_B11L.mT
            mean_BH1K = (v_BHLK * visible_B1L1).sum(2, keepdim=True) / visible_B1L1.sum(2, keepdim=True)
        index_BHUK = peakedness_BHL.topk(number).indices.unsqueeze(-1).expand(-1, -1, -1, q_BHLK.shape[3])
        chosen_BHUK = q_BHLK.gather(2, index_BHUK)
        mixed_BHUK = F.scaled_dot_product_attention(chosen_BHUK, k_BHLK, v_BHLK, attn_mask=visible_B11L)
        return mean_BH1K.expand_as(q_BHLK).scatter(2, index_BHUK, mixed_BHUK)


class LongformerAttention(EfficientAttention):
    """Sliding window and a global token (Beltagy et al. 2020, arXiv:2004.05150), `size` // 2 positions on each side.

    The last event is the global token. It shares the projections of local attention, unlike in the original.
    """

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, visible_B11L: Tensor | None) -> Tensor:
        local_BHLK = self._local(q_BHLK, k_BHLK, v_BHLK, visible_B11L)
        last_BH1K = F.scaled_dot_product_attention(q_BHLK[:, :, -1:], k_BHLK, v_BHLK, attn_mask=visible_B11L)
        return torch.cat([local_BHLK[:, :, :-1], last_BH1K], dim=2)

    def _local(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, visible_B11L: Tensor | None) -> Tensor:
        """Attend from each chunk of W positions to itself, to both neighbouring chunks and to the last event."""
        batch, heads, length, width = *q_BHLK.shape[:3], max(1, self.size // 2)
        padding = -length % width
        chunks = (length + padding) // width
        index_CW = torch.arange(-padding, length, device=q_BHLK.device).view(chunks, width)
        keys_CJ = (torch.arange(-width, 2 * width, device=q_BHLK.device) + index_CW[:, :1]).clamp(-1, length)
        band_CWJ = (index_CW[:, :, None] - keys_CJ[:, None, :]).abs() <= width
        # the last event is a key of its own, so it is left out of the window
        band_CWJ = band_CWJ & ((keys_CJ >= 0) & (keys_CJ < length - 1))[:, None, :]
        seen_BCWJ = F.pad(band_CWJ, (0, 1), value=True).unsqueeze(0)
        keys_CJ = F.pad(keys_CJ.clamp(0, length - 1), (0, 1), value=length - 1)
        if visible_B11L is not None:
            seen_BCWJ = seen_BCWJ & visible_B11L[:, 0, 0][:, keys_CJ].unsqueeze(2)
        seen_BXWJ = seen_BCWJ.unsqueeze(1).expand(-1, heads, -1, -1, -1).flatten(1, 2)  # X = heads x chunks
        q_BXWK = F.pad(q_BHLK, (0, 0, padding, 0)).unflatten(2, (chunks, width)).flatten(1, 2)
        k_BXJK, v_BXJK = (x[:, :, keys_CJ].flatten(1, 2) for x in (k_BHLK, v_BHLK))
        mixed_BXWK = F.scaled_dot_product_attention(q_BXWK, k_BXJK, v_BXJK, attn_mask=seen_BXWJ)
        return mixed_BXWK.view(batch, heads, chunks * width, -1)[:, :, padding:]


class BigBirdAttention(EfficientAttention):
    """Window, global token and random keys (Zaheer et al., NeurIPS 2020, arXiv:2007.14062), with blocks of one event.

    A query sees `size` // 2 positions on each side, the last event, which sees all, and `size` keys drawn once.
    """

    drawn: Tensor  # (length, length) bool, counted back from the last event

    def __init__(self, d_model: int, heads: int, length: int, size: int) -> None:
        super().__init__(d_model, heads, length, size)
        order_LL = torch.rand(length, length, generator=torch.Generator().manual_seed(0)).argsort(-1)
        self.register_buffer("drawn", order_LL < size, persistent=False)

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, visible_B11L: Tensor | None) -> Tensor:
        length = q_BHLK.shape[2]
        place_L = torch.arange(length, device=q_BHLK.device)
        seen_LL = (place_L[:, None] - place_L).abs() <= max(1, self.size // 2)
        seen_LL = seen_LL | self.drawn[:length, :length].flip(0, 1)
        seen_LL[-1], seen_LL[:, -1] = True, True
        seen = seen_LL if visible_B11L is None else seen_LL & visible_B11L
        return F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask=seen)


class ReformerAttention(EfficientAttention):
    """Attention within buckets of similar vectors (Kitaev et al., ICLR 2020, arXiv:2001.04451), whole buckets at once.

    Queries serve as keys, scaled to unit length. A vector's bucket is the largest of its `size` random projections and
    of their negatives. A query sees its bucket in any of `ROUNDS` rounds, and itself only where it sees nothing else.
    """

    ROUNDS = 2
    rotations: Tensor  # (ROUNDS, K, size)

    def __init__(self, d_model: int, heads: int, length: int, size: int) -> None:
        super().__init__(d_model, heads, length, size)
        generator = torch.Generator().manual_seed(0)
        rotations = torch.randn(self.ROUNDS, d_model // heads, size, generator=generator)
        self.register_buffer("rotations", rotations, persistent=False)

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, visible_B11L: Tensor | None) -> Tensor:
        projected = torch.einsum("bhlk,rks->rbhls", q_BHLK, self.rotations)
        bucket = torch.cat([projected, -projected], -1).argmax(-1)
        seen_BHLL = (bucket.unsqueeze(-1) == bucket.unsqueeze(-2)).any(0)
        if visible_B11L is not None:
            seen_BHLL = seen_BHLL & visible_B11L
        same_LL = torch.eye(q_BHLK.shape[2], dtype=torch.bool, device=q_BHLK.device)
        bias_BHLL = torch.zeros_like(seen_BHLL, dtype=q_BHLK.dtype).masked_fill(~seen_BHLL, float("-inf"))
        bias_BHLL = bias_BHLL.masked_fill(same_LL, -1e5)
        return F.scaled_dot_product_attention(q_BHLK, F.normalize(q_BHLK, dim=-1), v_BHLK, attn_mask=bias_BHLL)


class FlashAttention(EfficientAttention):
    """Gated attention, exact within chunks of `size` events and linear beyond (Hua et al. 2022, arXiv:2202.10447).

    Within a chunk, weights are relu(q k)^2 / chunk length; of all chunks, every query reads the mean of k v. Queries
    and keys are one shared vector with own scales and shifts for both uses. A single head gates `d_model` values.
    """

    def __init__(self, d_model: int, heads: int, length: int, size: int) -> None:
        super().__init__(d_model, heads, length, size)
        self.width = d_model // heads
        self.to_query_key_value = nn.Linear(d_model, 2 * d_model + self.width)  # values, gate, shared vector
        self.scale = nn.Parameter(torch.ones(4, self.width))
        self.shift = nn.Parameter(torch.zeros(4, self.width))

    def forward(self, query_BLD: Tensor, source_BLD: Tensor, visible_B11L: Tensor | None) -> Tensor:
        length, width = source_BLD.shape[1:]
        events: int | Tensor = length
        v_BLD, gate_BLD, shared_BLK = F.silu(self.to_query_key_value(source_BLD)).split([width, width, self.width], -1)
        uses = shared_BLK.unsqueeze(-2) * self.scale + self.shift
        if visible_B11L is not None:
            uses = uses * visible_B11L.squeeze(1).mT.unsqueeze(-1)
            v_BLD = v_BLD * visible_B11L.squeeze(1).mT
            events = visible_B11L.squeeze(1).sum(-1, keepdim=True)
        padding = -length % self.size  # in front: the last chunk is always whole
        q_BCWK, k_BCWK, far_q_BCWK, far_k_BCWK = (
            F.pad(part, (0, 0, padding, 0)).unflatten(1, (-1, self.size)) for part in uses.unbind(-2)
        )
        v_BCWD = F.pad(v_BLD, (0, 0, padding, 0)).unflatten(1, (-1, self.size))
        near_BCWD = F.relu(q_BCWK @ k_BCWK.mT / self.size).square() @ v_BCWD
        far_BKD = (far_k_BCWK.mT @ v_BCWD).sum(1) / events
        mixed_BLD = (near_BCWD + far_q_BCWK @ far_BKD.unsqueeze(1)).flatten(1, 2)[:, padding:]
        return self.to_out(gate_BLD * mixed_BLD)


class AutoformerAttention(EfficientAttention):
    """Auto-correlation (Wu et al., NeurIPS 2021, arXiv:2106.13008): values shifted by the lags that correlate most.

    The mean correlation of queries and keys over heads and channels, by FFT, names ceil(size ln L) lags per sequence;
    values, rolled by each lag, are summed with the softmax of the lags' correlations. All sequences are `length` long,
    with zeros in front.
    """

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, visible_B11L: Tensor | None) -> Tensor:
        if visible_B11L is not None:
            q_BHLK, k_BHLK, v_BHLK = (x * visible_B11L.mT for x in (q_BHLK, k_BHLK, v_BHLK))
        length, padding = self.length, self.length - q_BHLK.shape[2]
        q_BHLK, k_BHLK, v_BHLK = (F.pad(x, (0, 0, padding, 0)) for x in (q_BHLK, k_BHLK, v_BHLK))
        number = min(length, math.ceil(self.size * math.log(max(2, length))))
        spectrum = torch.fft.rfft(q_BHLK.float(), dim=2) * torch.fft.rfft(k_BHLK.float(), dim=2).conj()
        correlation_BL = torch.fft.irfft(spectrum, n=length, dim=2).mean((1, 3))
        weight_BU, lag_BU = correlation_BL.topk(number)
        place_BUL = (torch.arange(length, device=q_BHLK.device) + lag_BU.unsqueeze(-1)) % length
        weight_BLL = torch.zeros(len(q_BHLK), length, length, device=q_BHLK.device)
        weight_BLL = weight_BLL.scatter(2, place_BUL.mT, weight_BU.softmax(-1).unsqueeze(1).expand(-1, length, -1))
        return (weight_BLL.unsqueeze(1).to(v_BHLK.dtype) @ v_BHLK)[:, :, padding:]


EFFICIENT: dict[str, type[EfficientAttention]] = {
    "linformer": LinformerAttention,
    "informer": InformerAttention,
    "longformer": LongformerAttention,
    "bigbird": BigBirdAttention,
    "reformer": ReformerAttention,
    "flash": FlashAttention,
    "autoformer": AutoformerAttention,
}
