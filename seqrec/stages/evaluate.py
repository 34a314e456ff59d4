"""The evaluate stage: rank every test case among the whole catalogue."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from seqrec.artifacts import REFIT
from seqrec.config import EvaluateConfig
from seqrec.data import sequences as data
from seqrec.evaluation import ranking, results
from seqrec.training import cards
from seqrec.training.checkpoint import load_model


def evaluate(
    *, model: str, sequences: Path, checkpoint: Path, report: Path, config: EvaluateConfig
) -> dict[str, float]:
    """Rank the validation and test cases with the trained `model`, and write metrics, cases and recommendations.

    Args:
        model: its key in `models`.
        sequences: folder of the prepared dataset.
        checkpoint: folder of the trained weights.
        report: folder that receives the results.
        config: section `evaluate`.

    Raises:
        ValueError: the checkpoint belongs to another catalogue, or has seen the cases.
    """
    net, card = load_model(checkpoint)
    if REFIT in card:
        raise ValueError(
            f"{checkpoint} was refitted on every event: it has seen the cases that it would be measured on"
        )
    cards.check_catalogue(checkpoint, card, sequences, users="user" in net.needs)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prepared = data.load(sequences).to(device)
    facts = {"parameters": card["parameters"], "train_seconds": card["seconds"]}
    began = time.monotonic()
    values = results.report(ranking.model_scorer(net.to(device)), prepared, report, config, facts)
    return values | {"evaluate_seconds": time.monotonic() - began}
