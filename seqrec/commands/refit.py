"""The champion trained once more on every event, the held-out ones too, to be served in its own place.

Nothing is left to measure on: the evaluated version's figures stand for both, the gate compares with them, and a
retraining starts from its weights, which have not seen the test events.
"""

from __future__ import annotations

import logging
from pathlib import Path

from seqrec.artifacts import REFITTED, SPLIT_CARD, WEIGHTS, read_json, sha256
from seqrec.config import ConfigError, RegisterConfig
from seqrec.tracking import registry, runs
from seqrec.training.refit import history, retrain

logger = logging.getLogger(__name__)


def refit(
    *, dataset: str, artifacts: Path, sequences: Path, state: Path, config: RegisterConfig, resume: bool = False
) -> dict[str, float]:
    """Train the champion once more on every event, and make that the champion.

    Args:
        dataset: whose champion.
        artifacts: holds `<model>/initial/` and `<model>/finetuned/` of the champion; gets `<model>/refitted/`.
        sequences: the prepared dataset.
        state: folder of resume states.
        config: section `register`.
        resume: refuse to start afresh.

    Returns:
        Epochs and seconds of the training, and the version.

    Raises:
        ConfigError: there is no champion, or the folders are not those that it was made of.
        TrackingError: the server does not answer, or there is another champion by the end.
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
        records = history(refitted)
        version = registry.register_refit(client, evaluated, checkpoint=refitted, history=records, config=config)
    logger.info("version %s of %s, a refit of version %s, is the champion", version.version, name, evaluated.version)
    return {**values, "version": float(version.version)}
