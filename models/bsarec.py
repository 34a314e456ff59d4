"""BSARec: self-attention combined with a frequency filter (Shin et al., AAAI 2024, arXiv:2312.10325).

A layer is the sum of a filter, weighted by alpha, and attention, weighted by 1 - alpha. The filter splits the window
into low and high frequencies of its Fourier transform along the positions, and rescales the high ones per channel.

Because of the Fourier transform, every output depends on every event of the window, so an event can only be predicted
from a window that ends before it. Training examples are therefore prefixes (objective `last`), and only their last row
is used. Positions before the first event read all positions of the window alike, as in the paper's code: there, a
softmax over keys that are all masked by -10,000 ignores the mask. The filter carries them on to the last position.

Differs from the paper's code in these places:
- the filter is a constant matrix, since all windows are padded to one length;
- positions count back from the most recent event, which is a mere renaming for windows of one length;
- the vector of padding is 0 at the start; in the code it is random, and never trained;
- by default, attention weights have no dropout (`attention_dropout`), so that a fused kernel can be used.

Shape suffixes, besides those of base.py: N positions of the padded window, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, Objective, SequenceModel, TaskLoss, require
from seqrec.models.layers import (
    INIT_STD,
    AttentionOptions,
    Dropout,
    MultiHeadAttention,
    attention_bias,
    initialise,
    run_blocks,
)

NORM_EPS = 1e-12  # as in the paper's code; initial embeddings are small


@dataclass(frozen=True, kw_only=True)
class BSARecOptions(AttentionOptions):
    """Options of BSARec."""

    objective: Objective = "last"
    dropout: float = 0.5
    alpha: float = 0.7  # weight of the filter in a layer's output; attention has 1 - alpha
    cut: int = 5  # c of the paper: frequencies 0 to c // 2 count as low

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.alpha <= 1, "alpha must be from 0 to 1")
        require(1 <= self.cut <= self.length, "cut must be from 1 to length")


def low_pass(length: int, cut: int) -> Tensor:
    """Return the matrix (N, N) that keeps frequencies 0 to `cut` // 2 of a sequence of `length` values."""
    spectrum = torch.fft.rfft(torch.eye(length, dtype=torch.float64), dim=0)
    spectrum[cut // 2 + 1 :] = 0
    return torch.fft.irfft(spectrum, n=length, dim=0).float()


class Block(nn.Module):
    """Filter and attention in parallel, followed by a point-wise network (paper, eqs. 9 to 14)."""

    slow_NN: Tensor

    def __init__(self, options: BSARecOptions) -> None:
        super().__init__()
        d_model, self.alpha = options.d_model, options.alpha
        self.register_buffer("slow_NN", low_pass(options.length, options.cut), persistent=False)
        self.root_beta = nn.Parameter(torch.randn(d_model))
        self.norm_filter = nn.LayerNorm(d_model, NORM_EPS)
        self.attention = MultiHeadAttention(d_model, options.heads, options.attention_dropout)
        self.norm_attention = nn.LayerNorm(d_model, NORM_EPS)
        self.inner = nn.Linear(d_model, 4 * d_model)
        self.outer = nn.Linear(4 * d_model, d_model)
        self.norm = nn.LayerNorm(d_model, NORM_EPS)
        self.dropout = Dropout(options.dropout)

    def forward(self, x_BND: Tensor, queries: slice, bias_BNN: Tensor) -> Tensor:
        """Return the block's output (B, Q, D) at the positions `queries`."""
        x_BQD = x_BND[:, queries]
        slow_BQD = self.slow_NN[queries] @ x_BND
        filtered_BQD = slow_BQD + self.root_beta**2 * (x_BQD - slow_BQD)
        filtered_BQD = self.norm_filter(x_BQD + self.dropout(filtered_BQD))
        mixed_BQD = self.attention(x_BQD, x_BND, bias_BNN[:, queries])
        mixed_BQD = self.norm_attention(x_BQD + self.dropout(mixed_BQD))
        x_BQD = self.alpha * filtered_BQD + (1 - self.alpha) * mixed_BQD
        return self.norm(x_BQD + self.dropout(self.outer(F.gelu(self.inner(x_BQD)))))


class BSARec(SequenceModel):
    """Frequency filter and self-attention over the user's most recent items."""

    Options = BSARecOptions
    options: BSARecOptions
    objectives = frozenset({"last"})

    def __init__(self, options: BSARecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.items = nn.Embedding(catalogue.num_items + 1, options.d_model, padding_idx=PAD)
        self.positions = nn.Parameter(torch.empty(options.length, options.d_model).normal_(std=INIT_STD))
        self.norm = nn.LayerNorm(options.d_model, NORM_EPS)
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """See `SequenceModel.forward`; rows other than the last depend on later events."""
        length = batch.items.shape[1]
        items_BN = F.pad(batch.items, (self.options.length - length, 0), value=PAD)
        bias_BNN = attention_bias(items_BN, causal=True).masked_fill((items_BN == PAD).unsqueeze(2), 0.0)
        x_BND: Tensor = self.dropout(self.norm(self.items(items_BN) + self.positions))
        x_BND = run_blocks(self.blocks, x_BND, bias_BNN, last=last)
        return x_BND if last else x_BND[:, -length:]

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; only the last row has a target."""
        return {"task": task(self(batch, last=True)).sum()}
