"""LRURec: linear recurrence for sequential recommendation (Yue et al., WSDM 2024, arXiv:2310.02367).

The state of a linear recurrent unit (Orvieto et al. 2023, arXiv:2303.06349) is h_t = lambda * h_(t-1) + gamma * B x_t
with a complex lambda per channel. As the recurrence is linear, a parallel scan computes the states of all positions in
log2(length) steps; in serving, a history could be represented by one state.

Differs from the paper's code in these places:
- complex numbers are pairs of real numbers, so that every precision and export format can be used; the output's bias
  has no imaginary part, which the code computes and discards;
- each step of the scan doubles its reach for all positions, instead of joining halves; this gives the same states
  without padding to a power of two;
- items have no bias; weights are initialised as in the other models, from a normal distribution without truncation.

Shape suffixes, besides those of base.py: S complex channels of the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, Options, SequenceModel
from seqrec.models.layers import Dropout, initialise, run_blocks

RING = (0.8, 0.99)  # range of the initial absolute value of lambda


@dataclass(frozen=True, kw_only=True)
class LRURecOptions(Options):
    """Options of LRURec."""

    d_model: int = 64
    layers: int = 2
    dropout: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "layers")


class LinearRecurrentUnit(nn.Module):
    """A diagonal linear recurrence and its output (paper, section 3.3)."""

    def __init__(self, d_model: int, length: int) -> None:
        super().__init__()
        self.channels, self.length = 2 * d_model, length
        low, high = RING
        radius_S = (torch.rand(self.channels) * (high**2 - low**2) + low**2).sqrt()  # uniform on the area of the ring
        angle_S = torch.rand(self.channels).clamp(min=1e-6) * 2 * math.pi
        self.log_decay = nn.Parameter((-radius_S.log()).log())  # the absolute value of lambda stays under 1
        self.log_angle = nn.Parameter(angle_S.log())
        self.log_gamma = nn.Parameter((1 - radius_S**2).sqrt().log())  # keeps the state as large as its input
        self.to_state = nn.Linear(d_model, 2 * self.channels)  # real parts, then imaginary ones
        self.to_out = nn.Linear(2 * self.channels, d_model)  # the real part of a complex product

    def forward(self, x_BLD: Tensor, queries: slice, real_BL: Tensor) -> Tensor:
        """Return (B, Q, D) at the positions `queries`; the state is zero where a history begins."""
        scale_S = self.log_gamma.exp()
        input_BLS = self.to_state(x_BLD).to(scale_S.dtype) * real_BL.unsqueeze(-1)  # bf16 cannot add up a history
        parts = (part * scale_S for part in input_BLS.chunk(2, dim=-1))
        return self.to_out(torch.cat(self.scan(*parts), -1)[:, queries])

    def scan(self, real_BLS: Tensor, imaginary_BLS: Tensor) -> tuple[Tensor, Tensor]:
        """Return h_t = lambda * h_(t-1) + input_t of all positions, as real and imaginary parts.

        After k steps, a position holds the sum over its last 2^k inputs. The next step adds the sum that the position
        2^k places earlier holds, times lambda^(2^k).
        """
        length, reach = real_BLS.shape[1], 1
        while reach < self.length:  # the maximum length, since an exported graph cannot depend on that of its input
            size_S = (-self.log_decay.exp() * reach).exp()
            angle_S = self.log_angle.exp() * reach
            cosine_S, sine_S = size_S * angle_S.cos(), size_S * angle_S.sin()
            before, shifted = (F.pad(x, (0, 0, reach, 0))[:, :length] for x in (real_BLS, imaginary_BLS))
            real_BLS = real_BLS + cosine_S * before - sine_S * shifted
            imaginary_BLS = imaginary_BLS + sine_S * before + cosine_S * shifted
            reach *= 2
        return real_BLS, imaginary_BLS


class Block(nn.Module):
    """A recurrent unit and a point-wise network, each followed by a residual connection and layer norm."""

    def __init__(self, options: LRURecOptions) -> None:
        super().__init__()
        d_model = options.d_model
        self.unit = LinearRecurrentUnit(d_model, options.length)
        self.norm_unit = nn.LayerNorm(d_model)
        self.inner = nn.Linear(d_model, 4 * d_model)
        self.outer = nn.Linear(4 * d_model, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(options.dropout)

    def forward(self, x_BLD: Tensor, queries: slice, real_BL: Tensor) -> Tensor:
        """Return the block's output (B, Q, D) at the positions `queries`."""
        x_BQD = self.norm_unit(x_BLD[:, queries] + self.dropout(self.unit(x_BLD, queries, real_BL)))
        inner_BQD = self.dropout(F.gelu(self.inner(x_BQD)))
        return self.norm(x_BQD + self.dropout(self.outer(inner_BQD)))


class LRURec(SequenceModel):
    """Linear recurrent units over the user's most recent items."""

    Options = LRURecOptions
    options: LRURecOptions
    objectives = frozenset({"causal", "last"})

    def __init__(self, options: LRURecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.items = nn.Embedding(catalogue.num_items + 1, options.d_model, padding_idx=PAD)
        self.dropout = Dropout(options.dropout)
        self.norm = nn.LayerNorm(options.d_model)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        real_BL = batch.items != PAD
        x_BLD: Tensor = self.norm(self.dropout(self.items(batch.items)))
        return run_blocks(self.blocks, x_BLD, real_BL, last=last)
