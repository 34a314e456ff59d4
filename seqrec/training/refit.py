"""Refit: repeats a finished training on more events, either including the validation events or on all of them.

Settings, schedule and initial weights are those of the finished training, and each phase takes as many epochs as early
stopping chose there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from seqrec.artifacts import REFIT, VOCABULARY
from seqrec.config import FinetuneConfig, parse
from seqrec.data.sequences import load as load_sequences
from seqrec.data.sequences import trained_until
from seqrec.evaluation.metrics import SELECTION
from seqrec.training.checkpoint import Checkpoint, counts_config, load_checkpoint, recounted
from seqrec.training.progress import OpenLog, unlogged
from seqrec.training.train import Training, train


def retrain(
    *,
    model: str,
    sequences: Path,
    initial: Path,
    finetuned: Checkpoint,
    refitted: Path,
    state: Path,
    until: str = "test",
    open_log: OpenLog = unlogged,
) -> dict[str, float]:
    """Repeat the training that led to `finetuned` on all parts of the split up to `until`.

    The training started from the weights in `initial`; `until` is valid or test. The other arguments are those of the
    stage finetune, and `refitted` is the output folder.
    """
    card = finetuned.card
    finetuned.check_catalogue(sequences, users=True)
    config = parse(FinetuneConfig, card["config"], "finetune")
    if card["counts"]:  # keep the settings that validation chose, but count again
        config = replace(config, counts=asdict(counts_config(card["counts"])))
    epochs = chosen_epochs(finetuned.epoch_records())
    data = load_sequences(sequences)
    data = trained_until(data, data.valid_stop if until == "valid" else data.stop)
    vocabulary = recounted(finetuned.vocabulary, data.count)
    training = Training(
        name=model,
        stage="finetune",
        config=config,
        inputs=[sequences, initial],
        output=refitted,
        state=state,
        filter_seen=card["filter_seen"],
        open_log=open_log,
        content=[f"events until {until}", json.dumps(epochs)],
        epochs=epochs,
        files={**finetuned.files, VOCABULARY: vocabulary},
        facts={REFIT: {"fingerprint": card["fingerprint"], "epochs": epochs, "until": until}},
    )
    return train(load_checkpoint(initial).model, data, training)


def chosen_epochs(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the best epoch of each phase; 0 if the phase did not improve on the one before.

    >>> chosen_epochs([{"phase": "a", "epoch": 1, SELECTION: 0.2}, {"phase": "a", "epoch": 2, SELECTION: 0.1}])
    {'a': 1}
    """
    best, chosen = -1.0, dict[str, int]()
    for record in records:
        chosen.setdefault(record["phase"], 0)
        if record.get(SELECTION, -1.0) > best:
            best, chosen[record["phase"]] = record[SELECTION], record["epoch"]
    return chosen
