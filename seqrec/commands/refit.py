"""Refit: trains the champion again on all events, including the held-out ones, and makes the result the champion.

No events are left to evaluate the refit on, so the metrics of the evaluated version stand for both, and the gate uses
them. A retraining starts from the evaluated version, whose weights have not seen test events.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

from seqrec.artifacts import MODEL_PREFIX, REFITTED, SPLIT_CARD, read_json
from seqrec.config import ConfigError, RegisterConfig
from seqrec.pipeline import BASELINES
from seqrec.stages.baselines import rewrite
from seqrec.stages.register import exporting
from seqrec.tracking import registry, runs
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.refit import retrain

logger = logging.getLogger(__name__)


def refit(*, dataset: str, artifacts: Path, sequences: Path, state: Path, config: RegisterConfig) -> dict[str, float]:
    """Train the champion again on all events, and make the result the champion.

    Args:
        dataset: dataset whose champion to refit.
        artifacts: folder that holds `<model>/initial/` and `<model>/finetuned/` of the champion, and receives
            `<model>/refitted/`.
        sequences: the prepared dataset.
        state: folder of resume states.
        config: section `register`.

    Returns:
        Seconds and, unless it is a baseline, epochs of the training, and the version.

    Raises:
        ConfigError: there is no champion, or it was not made from these folders.
        LockedError: another process registers models of the dataset.
        TrackingError: the server does not answer, or the champion has changed in the meantime.
    """
    client, name = runs.connect(config, create=False), MODEL_PREFIX + dataset
    with runs.registering(config, dataset), runs.explained(config):  # refused now, not after the training
        evaluated = registry.find_evaluated(client, name)
    if evaluated is None:
        raise ConfigError(f"{name} has no champion: run `make repro` first")
    model = evaluated.tags["seqrec.model"]
    finetuned, refitted = load_checkpoint(artifacts / model / "finetuned"), artifacts / model / REFITTED
    for path, key, found in (
        (finetuned.folder, registry.WEIGHTS_TAG, finetuned.card["weights_sha256"]),
        (finetuned.folder, runs.FINGERPRINT, finetuned.card["fingerprint"]),  # equal weights may have other counts
        (sequences, registry.SPLIT_TAG, read_json(sequences / SPLIT_CARD)["split_sha256"]),
    ):
        if evaluated.tags.get(key) != found:
            raise ConfigError(f"version {evaluated.version} of {name} was not made from {path} ({key} differs)")
    if model in BASELINES:
        values = rewrite(sequences, finetuned, refitted)
    else:
        values = retrain(
            model=model,
            sequences=sequences,
            initial=artifacts / model / "initial",
            finetuned=finetuned,
            refitted=refitted,
            state=state,
            open_log=runs.epoch_log(config.experiment),
        )
    graph = exporting(refitted) if config.graph else nullcontext()
    with graph as export, runs.registering(config, dataset), runs.explained(config):
        saved = load_checkpoint(refitted)
        version = registry.register_refit(client, evaluated, checkpoint=saved, export=export, config=config)
    logger.info("version %s of %s, a refit of version %s, is the champion", version.version, name, evaluated.version)
    return {**values, "version": float(version.version)}
