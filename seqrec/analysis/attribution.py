"""Which past events drove a recommendation: the effect of leaving one out, and the attention to each.

Shape suffixes:
  B rows   L events   W events and one before them   J variants of a row   K events of a variant   H heads   Q queries
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seqrec.counts.term import CountTerm
from seqrec.evaluation.ranking import POSITIONS_PER_PASS
from seqrec.models import attention_weights
from seqrec.models.base import PAD, Batch, SequenceModel
from seqrec.models.rec_denoiser import RecDenoiser


@torch.no_grad()
def leave_one_out(model: SequenceModel, batch: Batch, item_B: Tensor, term: CountTerm | None = None) -> Tensor:
    """Return (B, L): how much the score of an item drops when one event is left out.

    The other events keep their times, and earlier events move up. If the history is longer than the model's window, an
    event from before the window moves into it. Padding, and events that the model does not see, have 0. All
    variants are rows of one pass, or of several passes if one would take too much memory.

    Args:
        model: in eval mode.
        batch: histories, left-padded and without MASK, of any width.
        item_B: the item of each row.
        term: the counts that are added to the model's scores; the share of each event is added to its drop.
    """
    seen, length = model.options.history, batch.items.shape[1]
    items_BW, times_BW = (F.pad(x, (1, 0))[:, -seen - 1 :] for x in (batch.items, batch.times))
    kept_JK = _all_but_one(items_BW.shape[1], items_BW.device)
    items_BJK, times_BJK = items_BW[:, kept_JK], times_BW[:, kept_JK]
    last_BJ1 = 0.0 if model.options.from_request else times_BJK[:, :, -1:]
    times_BJK = (times_BJK - last_BJ1).masked_fill(items_BJK == PAD, 0.0)
    user_BJ = batch.user.unsqueeze(1).expand(items_BJK.shape[:2])
    variants = Batch(items_BJK.flatten(0, 1), times_BJK.flatten(0, 1), user_BJ.flatten())
    query_BJD = _queries(model, variants).unflatten(0, user_BJ.shape)
    score_BJ = (query_BJD * model.item_vectors()[item_B].float().unsqueeze(1)).sum(-1)
    drop_BJ = (score_BJ[:, :1] - score_BJ) * (items_BW != PAD)  # variant 0 is what the model saw
    drop_BL = F.pad(drop_BJ[:, 1:], (length - seen, 0)) if length > seen else drop_BJ[:, 1:]
    return drop_BL if term is None else drop_BL + term.shares(batch.items, item_B.unsqueeze(1))[:, 0]


@torch.no_grad()
def attention(model: SequenceModel, batch: Batch) -> Tensor | None:
    """Return (B, L): attention of the query for the next item to each event in the last layer, averaged over heads.

    A row need not sum to 1: masks remove some of the attention, and the MASK item takes some. None for a model without
    attention over single events.

    Args:
        model: in eval mode.
        batch: histories, left-padded and without MASK, of any width.
    """
    length, window = batch.items.shape[1], model.seen(batch)
    weight_BHQL = attention_weights.maps(model, model.asked(window), last=True)
    if weight_BHQL is None:
        return None
    weight_BL = weight_BHQL[:, :, -1].mean(1)[:, : window.items.shape[1]]  # without MASK
    return F.pad(weight_BL, (length - weight_BL.shape[1], 0))


@torch.no_grad()
def masked_attention(model: SequenceModel, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return the attention weights (B, L, L) of the last layer without and with its mask, averaged over heads.

    None for a model without learnt masks. A row is an event that reads.

    Args:
        model: in eval mode.
        batch: histories, left-padded and without MASK; L is the part that the model sees.
    """
    window = model.seen(batch)
    maps = model.masked_maps(model.asked(window)) if isinstance(model, RecDenoiser) else None
    if maps is None:
        return None
    length = window.items.shape[1]
    before_BLL, after_BLL = (weight_BHLL.mean(1)[:, :length, :length] for weight_BHLL in maps)
    return before_BLL, after_BLL


def _all_but_one(width: int, device: torch.device) -> Tensor:
    """Return (width, width - 1): row j counts up to `width` without j."""
    column = torch.arange(width - 1, device=device)
    return column + (column >= torch.arange(width, device=device).unsqueeze(1))


def _queries(model: SequenceModel, batch: Batch) -> Tensor:
    rows = max(1, POSITIONS_PER_PASS // batch.items.shape[1])
    parts = zip(*(x.split(rows) for x in batch), strict=True)
    return torch.cat([model(model.asked(Batch(*part)), last=True)[:, 0].float() for part in parts])
