"""The finetune stage: train a model for the next item."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from seqrec.artifacts import HISTORY, write_text
from seqrec.checkpoint import load_model
from seqrec.config import FinetuneConfig
from seqrec.data import sequences as data
from seqrec.training import train


def finetune(
    *,
    model: str,
    sequences: Path,
    initial: Path,
    checkpoint: Path,
    state: Path,
    filter_seen: bool,
    config: FinetuneConfig,
    curve: Path | None = None,
    resume: bool = False,
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
        curve: CSV file that receives one line per epoch, the form DVC plots.
        resume: refuse to start afresh.
    """
    net, _ = load_model(initial)
    values = train(
        net,
        data.load(sequences),
        "finetune",
        config,
        name=model,
        inputs=[sequences, initial],
        output=checkpoint,
        state=state,
        filter_seen=filter_seen,
        resume=resume,
    )
    if curve is not None:
        write_curve(checkpoint / HISTORY, curve)
    return values


def write_curve(history: Path, curve: Path) -> None:
    """Write the records of `history` (JSON lines) as CSV."""
    records = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
    names = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(curve, text.getvalue())
