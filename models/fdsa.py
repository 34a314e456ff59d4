"""FDSA: feature-level deeper self-attention (Zhang et al., IJCAI 2019).

Two streams of self-attention read the items of a history and their attributes; a linear layer joins their outputs at
each position. An attention over the attributes of an item first reduces them to one vector.

Differs from the paper in these places:
- attributes are the known words in columns of the items table, in any number;
- positions count back from the most recent event;
- the loss is that of the training settings, by default full softmax, not binary cross-entropy with one negative.

Shape suffixes, besides those of layers.py: M values of an item   N items
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqrec.models.base import PAD, Batch, Catalogue, Objective
from seqrec.models.bert4rec import BERT4RecOptions, Block
from seqrec.models.layers import Dropout, attention_bias, initialise, run_blocks
from seqrec.models.optional import ReadsAttributes


@dataclass(frozen=True, kw_only=True)
class FDSAOptions(BERT4RecOptions):
    """Options of FDSA."""

    objective: Objective = "causal"
    attributes: tuple[str, ...] = ()  # columns of the items table; default: the first three with text
    attribute_values: int = 16  # maximum number of words per item; words of one item alone do not count

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "attribute_values")


class Attributes(nn.Module):
    """Reduces an item's attributes to one vector by a learnt attention (paper, eqs. 1 and 2)."""

    def __init__(self, number: int, d_model: int) -> None:
        super().__init__()
        self.values = nn.Embedding(number, d_model, padding_idx=PAD)
        self.inner = nn.Linear(d_model, d_model)
        self.outer = nn.Linear(d_model, 1, bias=False)

    def forward(self, value_NM: Tensor) -> Tensor:
        """Return (..., D); 0 for items without attributes."""
        x_NMD = self.values(value_NM)
        score_NM1 = self.outer(torch.relu(self.inner(x_NMD)))
        none_NM1 = (value_NM == PAD).unsqueeze(-1)
        weight_NM1 = score_NM1.masked_fill(none_NM1, torch.finfo(score_NM1.dtype).min).softmax(-2)
        return (weight_NM1 * x_NMD).sum(-2)  # padding values are 0


class Stream(nn.Module):
    """Causal self-attention over the vectors of a history."""

    def __init__(self, options: FDSAOptions) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(options.length, options.d_model).normal_(std=0.02))
        self.norm = nn.LayerNorm(options.d_model)
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))

    def forward(self, x_BLD: Tensor, bias_BLL: Tensor, *, last: bool) -> Tensor:
        """Return (B, L, D), or (B, 1, D) with `last`."""
        x_BLD = self.dropout(self.norm(x_BLD + self.positions[-x_BLD.shape[1] :]))
        return run_blocks(self.blocks, x_BLD, bias_BLL, last=last)


class FDSA(ReadsAttributes):
    """Self-attention over items, and over their attributes."""

    Options = FDSAOptions
    options: FDSAOptions
    objectives = frozenset({"causal", "last"})
    value_VM: Tensor

    def __init__(self, options: FDSAOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        value_VM = self.tokens()["values"]
        self.register_buffer("value_VM", value_VM, persistent=False)
        self.items = nn.Embedding(catalogue.num_items + 1, options.d_model, padding_idx=PAD)
        self.attributes = Attributes(int(value_VM.max()) + 1, options.d_model)
        self.of_items, self.of_attributes = Stream(options), Stream(options)
        self.join = nn.Linear(2 * options.d_model, options.d_model)
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        bias_BLL = attention_bias(batch.items, causal=True)
        item_BLD = self.of_items(self.items(batch.items), bias_BLL, last=last)
        attribute_BLD = self.of_attributes(self.attributes(self.value_VM[batch.items].long()), bias_BLL, last=last)
        return self.join(torch.cat([item_BLD, attribute_BLD], -1))
