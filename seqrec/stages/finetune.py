"""The finetune stage: train a model for the next item."""

from __future__ import annotations

from pathlib import Path

from seqrec.config import EXPERIMENT, FinetuneConfig
from seqrec.data.sequences import load as load_sequences
from seqrec.training import cards
from seqrec.training.checkpoint import load_model
from seqrec.training.job import Job, train
from seqrec.training.progress import LogEpoch


def finetune(
    *,
    model: str,
    sequences: Path,
    initial: Path,
    checkpoint: Path,
    state: Path,
    filter_seen: bool,
    config: FinetuneConfig,
    resume: bool = False,
    log: LogEpoch | None = None,
    experiment: str = EXPERIMENT,
) -> dict[str, float]:
    """Train `model` for the next item; continue from the resume state whose fingerprint matches, if there is one.

    Args:
        model: its key in `models`.
        sequences: folder of the prepared dataset.
        initial: folder of the weights to start from.
        checkpoint: folder that receives the best weights, their card and the history.
        state: folder of resume states.
        filter_seen: whether validation leaves out seen items.
        config: section `finetune`.
        resume: refuse to start afresh.
        log: for callers in Python: gets each epoch's record in place of MLflow, and may end the training by raising.
        experiment: where MLflow gets it, if MLFLOW_TRACKING_URI is set; `register.experiment`.

    Raises:
        ValueError: the weights to start from belong to another catalogue.
    """
    net, card = load_model(initial)
    cards.check_catalogue(initial, card, sequences, users=True)
    job = Job(
        name=model,
        stage="finetune",
        config=config,
        inputs=[sequences, initial],
        output=checkpoint,
        state=state,
        filter_seen=filter_seen,
        resume=resume,
        log=log,
        earlier_seconds=card["seconds"],
        experiment=experiment,
        files=cards.read_files(initial, card),
    )
    return train(net, load_sequences(sequences), job)
