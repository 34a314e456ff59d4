"""A contrastive loss term for any encoder: it pulls two views of a window together.

A view is the query at the end of a window. The second view comes from a second pass over the same window, with other
dropout (CL4SRec; DuoRec, unsupervised). With `same_target` it comes from another training window with the same target
(Qiu et al., DuoRec, WSDM 2022, arXiv:2110.05730). The other rows of the batch are negatives, unless they have the same
target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqrec.config import ConfigError, ContrastConfig, TrainConfig, parse
from seqrec.data import sequences
from seqrec.data.sequences import Sequences, Shards
from seqrec.models.base import Batch, Options, SequenceModel
from seqrec.models.optional import self_supervised
from seqrec.training import losses
from seqrec.training.batches import trained_users


def term(config: TrainConfig) -> ContrastConfig | None:
    """Return the settings of the term, or None if it is not used."""
    return parse(ContrastConfig, config.contrast, "contrast") if config.contrast else None


def check(config: TrainConfig, model: SequenceModel, stage: str) -> None:
    """Raise ConfigError if the model or the settings do not allow the term."""
    wanted = term(config)
    if wanted is None:
        return
    if len(model.parts) > 1:
        raise ConfigError(f"{stage}.contrast: works only with options.members: 1")
    if model.options.masked or any(self_supervised(model, phase) for phase in model.phases(stage)):
        raise ConfigError(f"{stage}.contrast: needs a model that predicts what follows its window")
    if wanted.same_target and not config.resident:
        raise ConfigError(f"{stage}.contrast.same_target: needs {stage}.resident: true")


def same_target(data: Sequences, config: TrainConfig) -> SameTarget | None:
    """Return the windows to draw partners from, or None if the term needs no partners."""
    wanted = term(config)
    return SameTarget(data, config) if wanted and wanted.same_target else None


class SameTarget:
    """All training windows, grouped by their target item; on the CPU, so that drawing never waits for the device."""

    def __init__(self, data: Sequences, config: TrainConfig) -> None:
        items = torch.cat(list(data.items.parts)) if isinstance(data.items, Shards) else data.items
        self.items_E, self.start_U = items.cpu().long(), data.start.cpu()
        windows_U = (data.train_stop.cpu() - self.start_U - 1).clamp(min=0) * trained_users(data, config)
        user_W, target_W = sequences.ranges(self.start_U + 1, windows_U)  # a user's first event is no target
        order_W = self.items_E[target_W].argsort(stable=True)
        self.user_W, self.target_W = user_W[order_W], target_W[order_W]
        self.number_V = torch.bincount(self.items_E[target_W], minlength=data.num_items + 1)
        self.first_V = self.number_V.cumsum(0) - self.number_V

    def draw(self, target_B: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return, for each flat index in `target_B`, user and flat index of a random event with the same item."""
        item_B = self.items_E[target_B]
        share_B = torch.rand(len(item_B), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        chosen_B = self.first_V[item_B] + (share_B * self.number_V[item_B]).long()
        return self.user_W[chosen_B], self.target_W[chosen_B]

    def windows(self, data: Sequences, target_B: Tensor, options: Options, seed: int) -> Batch:
        """Return windows of a model with `options`, whose targets are the events that `draw` returns."""
        user_B, partner_B = self.draw(target_B, seed)
        width = sequences.padded_width(int((partner_B - self.start_U[user_B]).max()), options.length)
        user_B, partner_B = (sequences.sent(x, data.items.device) for x in (user_B, partner_B))
        return sequences.window(data, user_B, partner_B, width, from_request=options.from_request)


def terms(
    config: ContrastConfig, model: SequenceModel, batch: Batch, view_BD: Tensor, target_B: Tensor, partner: Batch | None
) -> dict[str, Tensor]:
    """Return the terms of a step by name: `contrast` (dropout) and `contrast_target` (windows with the same target).

    Args:
        config: the settings.
        model: in training mode.
        batch: the step's windows.
        view_BD: their last queries, from the pass that computes the prediction loss.
        target_B: their target items.
        partner: for each row a window with the same target; used only if `same_target` has a weight.
    """
    found = {}
    for name, weight, other in (("contrast", config.weight, batch), ("contrast_target", config.same_target, partner)):
        if weight:
            assert other is not None
            other_BD = model(other, last=True)[:, -1]
            with torch.autocast(view_BD.device.type, enabled=False):
                value = losses.info_nce(
                    view_BD.float(),
                    other_BD.float(),
                    target_B,
                    temperature=config.temperature,
                    cosine=config.similarity == "cosine",
                )
            found[name] = weight * value.mean()
    return found
