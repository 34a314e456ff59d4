"""A contrastive loss term for any encoder: it pulls two views of a window together.

A view is the query at the end of a window. The second view comes from a second pass over the same window, with other
dropout (CL4SRec; DuoRec, unsupervised). The other rows of the batch are negatives, unless they have the same target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqrec.config import ConfigError, TrainConfig
from seqrec.models.base import Batch, SequenceModel
from seqrec.models.optional import self_supervised
from seqrec.training import losses


def check(config: TrainConfig, model: SequenceModel, stage: str) -> None:
    """Raise ConfigError if the model does not allow the term that the settings ask for."""
    if not config.contrast:
        return
    if len(model.parts) > 1:
        raise ConfigError(f"{stage}.contrast: works only with options.members: 1")
    if model.options.masked or any(self_supervised(model, phase) for phase in model.phases(stage)):
        raise ConfigError(f"{stage}.contrast: needs a model that predicts what follows its window")
    if not model.other_views.isdisjoint(model.phases(stage)):
        name = model.architecture.__name__
        raise ConfigError(f"{stage}.contrast: {name} computes a second view of a window in another way; leave it 0")


def term(model: SequenceModel, batch: Batch, view_BD: Tensor, target_B: Tensor) -> Tensor:
    """Return the mean of the term over the views of a step.

    `view_BD` are the last queries of its windows, from the pass that computes the prediction loss.
    """
    other_BD = model(batch, last=True)[:, -1]
    with torch.autocast(view_BD.device.type, enabled=False):
        return losses.info_nce(view_BD.float(), other_BD.float(), target_B).mean()
