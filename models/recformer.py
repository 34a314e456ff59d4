"""Recformer: items and histories as text (Li et al., KDD 2023, arXiv:2305.13731), and its small form Recformer-mini.

A Longformer-style encoder reads the attributes of an item, or of all items of a history. Its output at [CLS] is the
vector, or the mean over its tokens (`pooling`); a score is the cosine of two vectors divided by a temperature. There is
no table of items, so the model can be used on other catalogues and new items without training.

`encoder: items` is a cheaper model, which is not in the paper: the encoder reads the text of each item separately,
and a small causal transformer reads a history as a sequence of item vectors. All positions of a history are trained at
once. With `refresh`, the text encoder is trained: each step encodes the items that it reads or scores, and items get
gradients from histories and as candidates. `refresh: false` encodes the catalogue once, for large catalogues and
encoders; the encoder of histories is then pre-trained with the contrastive loss of the paper on the catalogues of other
datasets. With `layers: 0`, an item's vector is the mean of its word embeddings.

Differs from the paper and its code in these places:
- attention weights have no dropout, so that a fused kernel can be used;
- the separate projections with which [CLS] reads the sequence are applied to one query instead of every token, since
  q . (W x) = (W^T q) . x and sum_t p_t (V x_t) = V (sum_t p_t x_t);
- the last layer computes only [CLS], unless masked words are predicted as well;
- other rows of a batch with the same target are not negatives, since equal texts have equal vectors;
- all rows of a batch are negatives, including those of other processes;
- targets have at least one earlier event;
- masked words are predicted with the table of word embeddings, as in eq. 8; the code has a separate matrix;
- each whole word is masked independently with the given probability; the code draws words until that share of a text's
  tokens, at least one and at most 512, is masked;
- HTML entities in the text are unescaped and white space is normalised; the code uses the values unchanged;
- attributes without a value are left out; the code reads the names of empty attributes.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

from seqrec.models.base import Batch, Catalogue, Objective, TaskLoss, require
from seqrec.models.layers import INIT_STD, AttentionOptions, Dropout, attention_bias, initialise, run_blocks
from seqrec.models.optional import ReadsTokens
from seqrec.models.sasrec import Block
from seqrec.models.text_encoder import Block as TextBlock
from seqrec.models.text_encoder import Encoder, ItemTexts, TextEncoderOptions, WordHead, frozen_copy

BERT_WIDTH = 768
ITEMS_PER_REPORT = 100_000
HISTORY_LAYERS = HISTORY_HEADS = 2  # of the encoder of histories, with encoder items

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RecformerOptions(TextEncoderOptions):
    """Options of Recformer."""

    objective: Objective = "last"  # encoder items: causal as well
    encoder: Literal["text", "items"] = "text"  # a history is read as one text | as item vectors
    temperature: float = 0.05
    mlm_weight: float = 0.1  # encoder text, pre-training: weight of predicting masked words
    mlm_probability: float = 0.15
    frozen_words: tuple[str, ...] = ("pretrain",)  # stages that do not train word embeddings
    # fine-tuning: recompute item vectors each epoch, with encoder items each step; false: keep them
    refresh: bool = True
    d_history: int = 64  # encoder items: width of the history encoder and of item vectors
    history_dropout: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.temperature > 0, "temperature must be positive")
        self.at_least(0, "mlm_weight")
        require(0 < self.mlm_probability < 1, "mlm_probability must be between 0 and 1")
        require(set(self.frozen_words) <= {"pretrain", "finetune"}, "frozen_words may list only pretrain and finetune")
        if self.encoder == "text":
            self.at_least(1, "layers")  # without layers, only encoder items works
            require(self.objective == "last", "objective must be last with encoder text; causal needs encoder items")
            self.check_unused("encoder is text", "d_history", "history_dropout")
        else:
            require(self.pooling == "mean", "pooling must be mean with encoder items")
            self.at_least(1, "d_history")
            require(self.d_history % HISTORY_HEADS == 0, f"d_history must be a multiple of {HISTORY_HEADS}")
            self.check_unused("encoder is items", "mlm_weight", "mlm_probability")


class Recformer(ReadsTokens):
    """A text encoder, and the vectors of all items that it makes; `Recformer(options, ...)` is the model of `encoder`.

    A model has three phases: `contrastive` pre-trains it, `refresh` fine-tunes the text encoder and renews the vectors
    of the items, `frozen` keeps these vectors.
    """

    Options = RecformerOptions
    options: RecformerOptions
    objectives = frozenset({"causal", "last"})
    pretraining = "contrastive"
    vectors: Tensor  # (V, D): unit vectors of the items

    @classmethod
    def pretrains(cls, options: RecformerOptions) -> bool:
        """See `SelfSupervised.pretrains`; a text encoder that is fine-tuned with item ids is not pre-trained."""
        return options.encoder == "text" or not options.refresh

    def __new__(cls, *given: Any) -> Recformer:
        """Return a model of the class that `options.encoder` chooses, unless a class has been chosen."""
        if cls is Recformer:
            cls = RecformerText if given[0].encoder == "text" else RecformerItems
        return super().__new__(cls)

    def __init__(self, options: RecformerOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.encoder = Encoder(options, int(self.tokens()["special"][-1]))

    def _initialise(self) -> None:
        initialise(self)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim >= 2:  # BERT's 0.02 suits its width; the outputs of narrow layers would vanish
                    parameter.mul_((BERT_WIDTH / self.options.d_model) ** 0.5)

    def _start(self) -> None:
        """Begin to use the catalogue, once all parts have their initial values."""
        self.table_encoder = frozen_copy(self.encoder)  # the encoder of `vectors`, also used for new items
        self.use(self.catalogue)
        self.enter("refresh")

    def use(self, catalogue: Catalogue) -> None:
        """Replace the catalogue by another one of the same tokeniser; `refresh` then computes its item vectors."""
        assert catalogue.tokens is not None
        device = self.encoder.words.weight.device
        self.catalogue = catalogue._replace(length=self.options.length)
        self.texts = ItemTexts(catalogue.tokens, self.options.length, device)
        assert self.texts.words == self.encoder.words.num_embeddings
        shape = (catalogue.num_items + 1, self.options.d_model)
        self.register_buffer("vectors", torch.zeros(shape, device=device))

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.requires_grad_(True)
        stage = "pretrain" if phase == self.pretraining else "finetune"
        self.encoder.words.requires_grad_(stage not in self.options.frozen_words)

    def on_epoch(self) -> None:
        if self.phase == "refresh":
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Encode all items of the catalogue into `vectors`, in eval mode."""
        was_training = self.training
        self.eval()
        item_V = torch.arange(1, len(self.vectors), device=self.vectors.device)
        for first in range(0, len(item_V), ITEMS_PER_REPORT):
            part_V = item_V[first : first + ITEMS_PER_REPORT]
            self.vectors[part_V] = F.normalize(self.encode(part_V.unsqueeze(1)).float(), dim=-1)
            if len(item_V) > ITEMS_PER_REPORT:
                logger.info("encoded %d of %d items", first + len(part_V), len(item_V))
        self.table_encoder.load_state_dict(self.encoder.state_dict())
        self.train(was_training)

    def serve(self, catalogue: Catalogue) -> None:
        self.use(catalogue)
        self.refresh()

    @torch.no_grad()
    def grown(self, catalogue: Catalogue) -> Recformer:
        """Return this model, with shared weights, for an extended catalogue; only new items are encoded.

        They are encoded by the encoder of the other items' vectors, since vectors of two encoders are not comparable.
        """
        model = copy.copy(self)
        model._buffers, model._modules = dict(self._buffers), dict(self._modules)
        model.use(catalogue)
        known = len(self.vectors)
        new_V = torch.arange(known, len(model.vectors), device=self.vectors.device)
        model.vectors[:known] = self.vectors
        new_VD = self.table_encoder.vectors(model.texts, new_V.unsqueeze(1))
        model.vectors[known:] = F.normalize(new_VD.float(), dim=-1)
        return model

    def encode(self, items_BL: Tensor) -> Tensor:
        """Return the vectors (B, D) of histories, left-padded, or of items (B, 1), by the present text encoder."""
        return self.encoder.vectors(self.texts, items_BL)

    def item_vectors(self) -> Tensor:
        """See `SequenceModel.item_vectors`; they are constants in training (Algorithm 1)."""
        return self.vectors

    def pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the unit vectors (B, D) of each row's history and of its target, the row's last event."""
        raise NotImplementedError

    def pair_scores(self, batch: Batch) -> Tensor:
        return self._cosines(*self.pairs(batch))

    def _cosines(self, history_BD: Tensor, target_ND: Tensor) -> Tensor:
        """Return cosines (B, N), divided by the temperature."""
        with torch.autocast(history_BD.device.type, enabled=False):
            score_BN: Tensor = history_BD @ target_ND.T / self.options.temperature
        return score_BN

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; in pre-training, the contrast with the targets of the other rows (10)."""
        if self.phase != self.pretraining:
            return super().training_loss(batch, task)
        target_B1 = batch.items[:, -1:]
        history_BD, target_BD = self.pairs(batch)
        first = torch.distributed.get_rank() * len(target_B1) if torch.distributed.is_initialized() else 0
        goal_B = first + torch.arange(len(target_B1), device=target_B1.device)
        score_BN = self._cosines(history_BD, gather(target_BD))
        same_BN = (target_B1 == gather(target_B1).T).scatter(1, goal_B.unsqueeze(1), False)
        return {"contrast": F.cross_entropy(score_BN.masked_fill(same_BN, float("-inf")), goal_B)}


class RecformerText(Recformer):
    """The model of the paper: the text encoder reads a history as one text."""

    objectives = frozenset({"last"})

    def __init__(self, options: RecformerOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.head = WordHead(options, self.encoder.words.num_embeddings)
        self._initialise()
        self._start()

    def phases(self, stage: str) -> tuple[str, ...]:
        """See `SequenceModel.phases`; the two of fine-tuning are the stages of Algorithm 1."""
        if stage == "pretrain":
            return ("contrastive",)
        return ("refresh", "frozen") if self.options.refresh else ("frozen",)

    def enter(self, phase: str) -> None:
        """See `SequenceModel.enter`; parameters that the loss of the phase does not reach are frozen as well."""
        super().enter(phase)
        masked = phase == "contrastive" and self.options.mlm_weight > 0
        self.head.requires_grad_(masked)
        last = self.encoder.blocks[-1]
        assert isinstance(last, TextBlock)
        last.attention.local.requires_grad_(masked or self.options.pooling == "mean")

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """Return queries (B, 1, D), with or without `last`, because a history is read as a whole."""
        query_BD = F.normalize(self.encode(batch.items).float(), dim=-1) / self.options.temperature
        return query_BD.unsqueeze(1)

    def pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        history_BD, target_BD = self.encode(batch.items[:, :-1]).float(), self.encode(batch.items[:, -1:]).float()
        return F.normalize(history_BD, dim=-1), F.normalize(target_BD, dim=-1)

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; pre-training also predicts masked words (11)."""
        terms = super().training_loss(batch, task)
        if self.phase == "contrastive" and self.options.mlm_weight > 0:
            given = self.encoder, self.texts, self.options.mlm_probability
            words = self.head.loss(*given, batch.items[:, :-1]) + self.head.loss(*given, batch.items[:, -1:])
            terms["words"] = self.options.mlm_weight * words
        return terms


class HistoryEncoder(nn.Module):
    """Causal self-attention over linearly mapped text vectors of a history's items, with SASRec's blocks."""

    def __init__(self, options: RecformerOptions) -> None:
        super().__init__()
        sizes = AttentionOptions(
            d_model=options.d_history,
            layers=HISTORY_LAYERS,
            heads=HISTORY_HEADS,
            dropout=options.history_dropout,
        )
        self.to_item = nn.Linear(options.d_model, sizes.d_model)
        self.positions = nn.Parameter(torch.empty(options.length, sizes.d_model).normal_(std=INIT_STD))
        self.dropout = Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.d_model)

    def forward(self, text_BLD: Tensor, items_BL: Tensor, *, last: bool) -> Tensor:
        """Return queries (B, L, D), or (B, 1, D) with `last`."""
        bias_BLL = attention_bias(items_BL, causal=True)
        x_BLD = self.to_item(text_BLD)
        x_BLD = self.dropout(x_BLD * x_BLD.shape[2] ** 0.5 + self.positions[-items_BL.shape[1] :])
        return self.norm(run_blocks(self.blocks, x_BLD, bias_BLL, last=last))


class StepVectors:
    """Text vectors with gradients in one training step, of the items that the step has asked for."""

    def __init__(self, model: Recformer) -> None:
        self.model, self.device = model, model.vectors.device
        self.bf16 = torch.is_autocast_enabled(self.device.type)  # the loss asks for its items outside of autocast
        self.place_V = torch.full((len(model.vectors),), -1, device=self.device)  # row of each item in `vector_ND`
        self.vector_ND = model.vectors[:0]

    def of(self, items: Tensor) -> Tensor:
        """Return the unit vectors (..., D) of `items` (...); those that the step has not asked for yet are encoded."""
        new_N = items.unique()
        new_N = new_N[self.place_V[new_N] < 0]
        if len(new_N):
            self.place_V[new_N] = torch.arange(len(new_N), device=self.device) + len(self.vector_ND)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                encoded_ND = self.model.encode(new_N.unsqueeze(1))
            self.vector_ND = torch.cat([self.vector_ND, F.normalize(encoded_ND.float(), dim=-1)])
        return F.embedding(self.place_V[items], self.vector_ND)


class RecformerItems(Recformer):
    """The text encoder reads items, and a history encoder reads the vectors of a history's items."""

    reads_events = True
    other_views = frozenset({"refresh"})  # a step encodes its items once

    def __init__(self, options: RecformerOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self._initialise()
        self.history = HistoryEncoder(options)
        initialise(self.history)
        self.step: StepVectors | None = None  # of the current step, if it trains the text encoder
        self._start()
        nn.Module.train(self, False)  # a loaded model has its vectors: only the end of training updates them

    def phases(self, stage: str) -> tuple[str, ...]:
        """See `SequenceModel.phases`; the history encoder is pre-trained if the text encoder is not trained."""
        if self.options.refresh:
            return () if stage == "pretrain" else ("refresh",)
        return ("contrastive",) if stage == "pretrain" else ("frozen",)

    def enter(self, phase: str) -> None:
        super().enter(phase)
        if phase != "refresh":
            self.encoder.requires_grad_(False)

    def on_epoch(self) -> None:
        """See `SequenceModel.on_epoch`; the first epoch of pre-training encodes the catalogue too."""
        if self.phase == "refresh" or not self.vectors.any():
            self.refresh()

    def train(self, mode: bool = True) -> RecformerItems:
        """Switch between training and eval mode; eval mode first updates the item vectors."""
        pauses = self.training and not mode
        super().train(mode)
        if pauses and self.phase == "refresh":
            self.refresh()
        return self

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        query_BLD = self.history(self._texts_of(batch.items), batch.items, last=last)
        return F.normalize(query_BLD.float(), dim=-1) / self.options.temperature

    def item_vectors(self) -> Tensor:
        return self.vectors_of(torch.arange(len(self.vectors), device=self.vectors.device))

    def vectors_of(self, items: Tensor, *, sparse: bool = False) -> Tensor:
        return F.normalize(self.history.to_item(self._texts_of(items)).float(), dim=-1)

    def _texts_of(self, items: Tensor) -> Tensor:
        return F.embedding(items, self.vectors) if self.step is None else self.step.of(items)

    def pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        query_BD = self(batch._replace(items=batch.items[:, :-1]), last=True)[:, 0] * self.options.temperature
        target_BD = self.history.to_item(F.embedding(batch.items[:, -1], self.vectors))
        return query_BD, F.normalize(target_BD.float(), dim=-1)

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; in `refresh`, the text encoder is trained."""
        if self.phase != "refresh":
            return super().training_loss(batch, task)
        self.step = StepVectors(self)
        try:
            if batch.items.numel() >= len(self.vectors):  # most items are needed: encoding all at once is faster
                self.step.of(torch.arange(len(self.vectors), device=self.vectors.device))
            return super().training_loss(batch, task)
        finally:
            self.step = None


def gather(x: Tensor) -> Tensor:
    """Return the rows of all processes, in order and with gradients; every process must have equally many."""
    return torch.cat(all_gather(x)) if torch.distributed.is_initialized() else x
