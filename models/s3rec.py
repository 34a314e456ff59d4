"""S3-Rec: self-supervised learning with four mutual-information losses (Zhou et al., CIKM 2020, arXiv:2008.07873).

Pre-training uses bidirectional attention and relates items, attributes, masked histories and segments. It reads every
prefix of a history, always masks its last item, and runs for all of `pretrain.epochs`, as in the paper's code.
Fine-tuning is that of SASRec, with causal attention, and starts from the pre-trained weights.

Differs from the paper's code in these places:
- each loss term is a sum over the batch divided by its rows, so that its weight does not depend on the batch size;
- negative items that occur in their own row are ignored; the code draws others;
- a prefix has at least two events, and prefixes of long histories begin with later events; the code also reads the
  first event alone, and only prefixes that begin with the oldest of the last `length` events;
- the other segment is drawn from the histories of the batch; the code draws it from all histories, including their
  validation and test events;
- positions count back from the most recent event;
- the loss of fine-tuning is that of the training settings, by default full softmax.

Shape suffixes, besides those of layers.py: M values of an item   K values of the catalogue + 1   N positions
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, TaskLoss, require
from seqrec.models.fdsa import FDSAOptions, Stream
from seqrec.models.layers import attention_bias, initialise
from seqrec.models.optional import ReadsAttributes, SelfSupervised

# of the paper's code (aap_weight and sp_weight of run_pretrain.py), where the other two terms have weight 1
ITEM_ATTRIBUTE_WEIGHT, SEGMENT_WEIGHT = 0.2, 0.5


@dataclass(frozen=True, kw_only=True)
class S3RecOptions(FDSAOptions):
    """Options of S3-Rec."""

    mask_probability: float = 0.2  # pre-training: probability of masking an item; the last one is always masked

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.mask_probability < 1, "mask_probability must be between 0 and 1")


class S3Rec(ReadsAttributes, SelfSupervised):
    """Self-attention over items, pre-trained on items, attributes and segments."""

    Options = S3RecOptions
    options: S3RecOptions
    objectives = frozenset({"causal", "last"})
    reads_events = True
    pretraining = "mutual"
    value_VM: Tensor

    def __init__(self, options: S3RecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        d_model, value_VM = options.d_model, self.tokens()["values"]
        self.register_buffer("value_VM", value_VM, persistent=False)
        self.mask = catalogue.num_items + 1
        self.items = nn.Embedding(self.mask + 1, d_model, padding_idx=PAD)
        self.attributes = nn.Embedding(int(value_VM.max()) + 1, d_model, padding_idx=PAD)
        self.stream = Stream(options)
        names = ("item_attribute", "item", "attribute", "segment")
        self.heads = nn.ModuleDict({name: nn.Linear(d_model, d_model) for name in names})
        initialise(self)
        self.enter("train")

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.attributes.requires_grad_(phase == "mutual")
        self.heads.requires_grad_(phase == "mutual")

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        return self._read(batch.items, causal=True, last=last)

    def item_vectors(self) -> Tensor:
        return self.items.weight[:-1]

    def _read(self, items_BL: Tensor, *, causal: bool, last: bool = False) -> Tensor:
        return self.stream(self.items(items_BL), attention_bias(items_BL, causal=causal), last=last)

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; in pre-training, the four terms."""
        if self.phase != "mutual":
            return super().training_loss(batch, task)
        items_BL = batch.items[:, -self.options.length :]
        draw_BL = torch.rand(items_BL.shape, device=items_BL.device)
        masked_BL = (items_BL != PAD) & (draw_BL < self.options.mask_probability)
        masked_BL[:, -1] = True
        other_BL = torch.randint_like(items_BL, 1, self.mask)
        terms = self.item_terms(items_BL, masked_BL, other_BL)
        return terms | {"segment": SEGMENT_WEIGHT * self.segment_term(items_BL, *draw_segments(items_BL))}

    def item_terms(self, items_BL: Tensor, masked_BL: Tensor, other_BL: Tensor) -> dict[str, Tensor]:
        """Return the terms of items and attributes (paper, eqs. 5 to 7).

        Args:
            items_BL: histories.
            masked_BL: whether an item is hidden.
            other_BL: for each position, a negative item.
        """
        rows = len(items_BL)
        out_BLD = self._read(items_BL.masked_fill(masked_BL, self.mask), causal=False)
        open_BL = (items_BL != PAD) & ~masked_BL
        known = self._attribute_loss("item_attribute", out_BLD[open_BL], items_BL[open_BL])
        hidden = self._attribute_loss("attribute", out_BLD[masked_BL], items_BL[masked_BL])
        foreign_BL = masked_BL & (other_BL.unsqueeze(2) != items_BL.unsqueeze(1)).all(2)
        out_ND = self.heads["item"](out_BLD[foreign_BL])
        pair = [(out_ND * self.items(x_BL[foreign_BL])).sum(-1) for x_BL in (items_BL, other_BL)]
        return {
            "item_attribute": ITEM_ATTRIBUTE_WEIGHT * known / rows,
            "attribute": hidden / rows,
            "item": closer(*pair).sum() / rows,
        }

    def _attribute_loss(self, name: str, out_ND: Tensor, item_N: Tensor) -> Tensor:
        """Return the sum of the binary cross-entropies of all attributes at all positions."""
        score_NK = self.heads[name](out_ND) @ self.attributes.weight.T
        value_NM = self.value_VM[item_N].long()
        own_NM = score_NK.gather(1, value_NM).masked_fill(value_NM == PAD, 0)
        return F.softplus(score_NK[:, 1:]).sum() - own_NM.sum()

    def segment_term(self, items_BL: Tensor, inside_BL: Tensor, other_BL: Tensor) -> Tensor:
        """Return the loss of telling the missing segment of a history from another segment (paper, eq. 8).

        Args:
            items_BL: histories.
            inside_BL: whether an item belongs to the segment; rows without a segment add nothing.
            other_BL: the items of the other segment, at the positions of the segment.
        """
        outside_BL = (items_BL != PAD) & ~inside_BL
        sides = (
            items_BL.masked_fill(inside_BL, self.mask),
            items_BL.masked_fill(outside_BL, self.mask),
            other_BL.where(inside_BL, items_BL).masked_fill(outside_BL, self.mask),
        )
        context_BD, own_BD, foreign_BD = (self._read(x_BL, causal=False, last=True)[:, 0] for x_BL in sides)
        context_BD = self.heads["segment"](context_BD)
        value_B = closer((context_BD * own_BD).sum(-1), (context_BD * foreign_BD).sum(-1))
        return (value_B * inside_BL.any(1)).sum() / len(items_BL)


def closer(own: Tensor, other: Tensor) -> Tensor:
    """Return -log sigmoid of the difference of two matches; as in the code, each match first becomes a probability."""
    return -F.logsigmoid(own.sigmoid() - other.sigmoid())


def draw_segments(items_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a segment of each history, and a segment of equal length from the concatenated histories of the batch.

    Returns:
        Bool (B, L): the positions of the segment, which is at most half of its history; items (B, L): the other
        segment, at these positions.
    """
    device, real_BL = items_BL.device, items_BL != PAD
    size_B = real_BL.sum(1)
    length_B = (torch.rand(len(size_B), device=device) * (size_B // 2)).long() + (size_B >= 2)
    first_B = (torch.rand(len(size_B), device=device) * (size_B - length_B + 1)).long()
    place_BL = real_BL.cumsum(1) - 1 - first_B.unsqueeze(1)
    inside_BL = real_BL & (place_BL >= 0) & (place_BL < length_B.unsqueeze(1))
    flat_N = items_BL[real_BL]
    start_B1 = (torch.rand(len(size_B), 1, device=device) * (len(flat_N) - length_B.unsqueeze(1) + 1)).long()
    other_BL = flat_N[(start_B1 + place_BL).clamp(0, max(0, len(flat_N) - 1))]
    return inside_BL, other_BL
