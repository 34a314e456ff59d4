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

from seqrec.models.base import PAD, Batch, Catalogue, Options, require
from seqrec.models.bert4rec import BERT4RecOptions, Block
from seqrec.models.layers import Dropout, attention_bias, initialise
from seqrec.models.optional import ReadsAttributes


@dataclass(frozen=True, kw_only=True)
class FDSAOptions(Options):
    """Options of FDSA."""

    attributes: tuple[str, ...] = ()  # columns of the items table; default: the first three with text
    attribute_values: int = 16  # maximum per item: words of its columns that other items have, too
    d_model: int = 64
    d_inner: int = 0  # width of the feed-forward networks; 0: 4 * d_model
    layers: int = 2
    heads: int = 2
    dropout: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.d_model, self.layers, self.heads) >= 1, "d_model, layers and heads must be at least 1")
        require(self.d_inner >= 0, "d_inner must be at least 0")
        require(self.attribute_values >= 1, "attribute_values must be at least 1")
        require(0 <= self.dropout < 1, "dropout must be at least 0 and under 1")


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
        out_ND: Tensor = (weight_NM1 * x_NMD).sum(-2)  # padding values are 0
        return out_ND


class Stream(nn.Module):
    """Causal self-attention over the vectors of a history."""

    def __init__(self, options: FDSAOptions) -> None:
        super().__init__()
        sizes = BERT4RecOptions(
            d_model=options.d_model,
            d_inner=options.d_inner,
            layers=options.layers,
            heads=options.heads,
            dropout=options.dropout,
        )
        self.positions = nn.Parameter(torch.empty(options.length, options.d_model).normal_(std=0.02))
        self.norm = nn.LayerNorm(options.d_model)
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(options.layers))

    def forward(self, x_BLD: Tensor, bias_BLL: Tensor, *, last: bool) -> Tensor:
        """Return (B, L, D), or (B, 1, D) with `last`."""
        x_BLD = self.dropout(self.norm(x_BLD + self.positions[-x_BLD.shape[1] :]))
        for number, block in enumerate(self.blocks, start=1):
            only_last = last and number == len(self.blocks)
            x_BLD = block(x_BLD, bias_BLL, slice(-1, None) if only_last else slice(None))
        return x_BLD


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
        """See `SequenceModel.forward`."""
        bias_BLL = attention_bias(batch.items, causal=True)
        item_BLD = self.of_items(self.items(batch.items), bias_BLL, last=last)
        attribute_BLD = self.of_attributes(self.attributes(self.value_VM[batch.items].long()), bias_BLL, last=last)
        out: Tensor = self.join(torch.cat([item_BLD, attribute_BLD], -1))
        return out

    def item_vectors(self) -> Tensor:
        """See `SequenceModel.item_vectors`."""
        return self.items.weight
