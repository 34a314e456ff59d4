"""The finetune stage: trains a model to predict the next item."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from seqrec.artifacts import REFITTED
from seqrec.config import EXPERIMENT, ConfigError, FinetuneConfig
from seqrec.data import data_warnings
from seqrec.data.sequences import Sequences
from seqrec.data.sequences import load as load_sequences
from seqrec.models.base import SequenceModel
from seqrec.tracking.runs import epoch_log
from seqrec.training import auto_settings, batches
from seqrec.training.auto_settings import Shape
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.progress import LogEpoch
from seqrec.training.refit import retrain
from seqrec.training.train import Training, train

logger = logging.getLogger(__name__)
_said: set[str] = set()


def finetune(
    *,
    model: str,
    sequences: Path,
    initial: Path,
    checkpoint: Path,
    state: Path,
    filter_seen: bool,
    config: FinetuneConfig,
    refit: str = "none",
    log: LogEpoch | None = None,
    experiment: str = EXPERIMENT,
) -> dict[str, float]:
    """Train `model` to predict the next item; resume if there is a state with the same fingerprint.

    Args:
        model: key in `models`.
        sequences: folder of the prepared dataset.
        initial: folder of the initial weights.
        checkpoint: output folder for the best weights, their card and the history.
        state: folder of resume states.
        filter_seen: whether validation leaves out seen items.
        config: section `finetune`.
        refit: `evaluate.refit`; with `valid`, weights that are also trained on the validation events are written to a
            folder inside `checkpoint`.
        log: for callers in Python: function that receives the record of each epoch, in place of MLflow; if it raises an
            exception, training ends.
        experiment: name of the MLflow experiment (`register.experiment`), used if MLFLOW_TRACKING_URI is set.

    Raises:
        ValueError: the initial weights belong to another catalogue.
    """
    start = load_checkpoint(initial)
    start.check_catalogue(sequences, users=True)
    net = start.model
    prepared = load_sequences(sequences)
    if net.phases("finetune"):
        shape = Shape.of(prepared)
        config = auto_settings.resolved(config, shape, start.card["architecture"], start.card["options"])
        if config.user_share < 1 and start.card["config"]["item_vectors"] == "counts":
            raise ConfigError(
                "finetune.user_share: vectors from counts read every user; set pretrain.item_vectors: random"
            )
        _warn(net, prepared, config, filter_seen)
    training = Training(
        name=model,
        stage="finetune",
        config=config,
        inputs=[sequences, initial],
        output=checkpoint,
        state=state,
        filter_seen=filter_seen,
        open_log=epoch_log(experiment, log),
        earlier_seconds=start.card["seconds"],
        files=start.files,
    )
    values = train(net, prepared, training)
    if refit == "none":
        shutil.rmtree(checkpoint / REFITTED, ignore_errors=True)  # of an earlier call
    else:
        retrain(
            model=model,
            sequences=sequences,
            initial=initial,
            finetuned=load_checkpoint(checkpoint),
            refitted=checkpoint / REFITTED,
            state=state,
            open_log=epoch_log(experiment),
            until=refit,
        )
    return values


def _warn(net: SequenceModel, prepared: Sequences, config: FinetuneConfig, filter_seen: bool) -> None:
    """Log the warnings about this dataset, each one once per process."""
    steps = None
    if config.batch_size > auto_settings.BATCHES[0]:  # the least that the rules choose
        windows = batches.windows(prepared, net.options, config, torch.Generator())
        steps = max(1, round(len(windows.user) / config.batch_size))
    for sentence in data_warnings.of(prepared, filter_seen=filter_seen, steps=steps):
        if (key := f"{prepared.card['split_sha256']} {sentence}") not in _said:
            _said.add(key)
            logger.warning("%s: %s", prepared.card["dataset"], sentence)
