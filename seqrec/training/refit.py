"""Refit: trains the champion again on all events, including the held-out ones, and serves the result in its place.

Settings, schedule and initial weights are those of the evaluated training, and each phase takes as many epochs as early
stopping chose there. No events are left to evaluate the refit on, so the metrics of the evaluated version stand for
both, and the gate uses them. A retraining starts from the evaluated version, whose weights have not seen test events.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from seqrec.artifacts import (
    HISTORY,
    REFIT,
    SPLIT_CARD,
    VOCABULARY,
    WEIGHTS,
    read_json,
    sha256,
)
from seqrec.config import ConfigError, FinetuneConfig, RegisterConfig, parse
from seqrec.data.sequences import Sequences, Shards
from seqrec.data.sequences import load as load_sequences
from seqrec.tracking import registry, runs
from seqrec.training import cards
from seqrec.training.checkpoint import counts_config, load_model
from seqrec.training.job import Job, train
from seqrec.training.progress import LogEpoch
from seqrec.training.validation import METRIC

logger = logging.getLogger(__name__)
REFITTED = "refitted"  # folder next to `finetuned`


def refit(
    *, dataset: str, artifacts: Path, sequences: Path, state: Path, config: RegisterConfig, resume: bool = False
) -> dict[str, float]:
    """Train the champion again on all events, and make the result the champion.

    Args:
        dataset: key of the dataset.
        artifacts: holds `<model>/initial/` and `<model>/finetuned/` of the champion; receives `<model>/refitted/`.
        sequences: folder of the prepared dataset.
        state: folder of resume states.
        config: section `register`.
        resume: fail instead of starting afresh.

    Returns:
        Epochs and seconds of the training, and the version.

    Raises:
        ConfigError: there is no champion, or the champion was not made from these folders.
        TrackingError: the server does not answer, or the champion changed meanwhile.
    """
    client, name = runs.connect(config), f"seqrec-{dataset}"
    evaluated = registry.find_evaluated(client, name)
    if evaluated is None:
        raise ConfigError(f"{name} has no champion: run the pipeline first")
    model = evaluated.tags["seqrec.model"]
    finetuned, refitted = artifacts / model / "finetuned", artifacts / model / REFITTED
    for path, key, found in (
        (finetuned, registry.WEIGHTS_TAG, sha256(finetuned / WEIGHTS)),
        (sequences, registry.SPLIT_TAG, read_json(sequences / SPLIT_CARD)["split_sha256"]),
    ):
        if evaluated.tags.get(key) != found:
            raise ConfigError(f"{path} is not what version {evaluated.version} of {name} was made of ({key} differs)")
    values = retrain(
        model=model,
        sequences=sequences,
        initial=artifacts / model / "initial",
        finetuned=finetuned,
        refitted=refitted,
        state=state,
        resume=resume,
        experiment=config.experiment,
    )
    with runs.registering(config, dataset), runs.explained(config):
        history = _history(refitted)
        version = registry.register_refit(client, evaluated, checkpoint=refitted, history=history, config=config)
    logger.info("version %s of %s, a refit of version %s, is the champion", version.version, name, evaluated.version)
    return {**values, "version": float(version.version)}


def retrain(
    *,
    model: str,
    sequences: Path,
    initial: Path,
    finetuned: Path,
    refitted: Path,
    state: Path,
    experiment: str,
    resume: bool = False,
    log: LogEpoch | None = None,
) -> dict[str, float]:
    """Repeat the training of `finetuned` on all events; write what serving needs to `refitted`."""
    _, card = load_model(finetuned)
    cards.check_catalogue(finetuned, card, sequences, users=True)
    config = parse(FinetuneConfig, card["config"], "finetune")
    if "counts" in card:  # keep the settings that validation chose, but count all events
        config = replace(config, counts=asdict(counts_config(card["counts"])))
    epochs = chosen_epochs(_history(finetuned))
    data = everything(load_sequences(sequences))
    files = cards.read_files(finetuned, card)
    files[VOCABULARY] = cards.with_counts(files[VOCABULARY], pa.array(data.count[1:].numpy()))
    job = Job(
        name=model,
        stage="finetune",
        config=config,
        inputs=[sequences, initial],
        output=refitted,
        state=state,
        filter_seen=card["filter_seen"],
        resume=resume,
        log=log,
        content=["every event", json.dumps(epochs)],
        epochs=epochs,
        experiment=experiment,
        files=files,
        facts={REFIT: {"fingerprint": card["fingerprint"], "epochs": epochs}},
    )
    return train(load_model(initial)[0], data, job)


def _history(checkpoint: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (checkpoint / HISTORY).read_text(encoding="utf-8").splitlines()]


def chosen_epochs(history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the best epoch of each phase; 0 if the phase did not improve on the one before.

    >>> chosen_epochs([{"phase": "a", "epoch": 1, METRIC: 0.2}, {"phase": "a", "epoch": 2, METRIC: 0.1}])
    {'a': 1}
    """
    best, chosen = -1.0, dict[str, int]()
    for record in history:
        chosen.setdefault(record["phase"], 0)
        if record.get(METRIC, -1.0) > best:
            best, chosen[record["phase"]] = record[METRIC], record["epoch"]
    return chosen


def everything(data: Sequences) -> Sequences:
    """Return `data` with all events in the training split."""
    parts = data.items.parts if isinstance(data.items, Shards) else [data.items]
    count = torch.stack([torch.bincount(part, minlength=len(data.count)) for part in parts]).sum(0)
    return replace(data, train_stop=data.stop, valid_stop=data.stop, count=count)
