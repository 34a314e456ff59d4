"""The pretrain stage: build a model, and run its pre-training phases if it has any."""

from __future__ import annotations

from pathlib import Path

import torch

from models.base import Catalogue
from seqrec.checkpoint import build
from seqrec.config import ModelConfig, PretrainConfig
from seqrec.data import sequences as data
from seqrec.training import train


def pretrain(
    *,
    model: str,
    sequences: Path,
    initial: Path,
    state: Path,
    architecture: ModelConfig,
    filter_seen: bool,
    config: PretrainConfig,
    resume: bool = False,
) -> dict[str, float]:
    """Build `model` from its seed and write it to `initial`, pre-trained where its architecture has such a phase.

    Args:
        model: its key in `models`.
        sequences: folder of the prepared dataset.
        initial: folder that receives weights, card and history.
        state: folder of resume states.
        architecture: what to build.
        filter_seen: whether validation leaves out seen items.
        config: section `pretrain`.
        resume: refuse to start afresh.
    """
    prepared = data.load(sequences)
    torch.manual_seed(config.seed)
    net = build(architecture, Catalogue(num_items=prepared.num_items, num_users=prepared.num_users, length=0))
    return train(
        net,
        prepared,
        "pretrain",
        config,
        name=model,
        inputs=[sequences],
        output=initial,
        state=state,
        filter_seen=filter_seen,
        resume=resume,
    )
