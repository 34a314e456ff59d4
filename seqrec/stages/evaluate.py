"""The evaluate stage: ranks each validation and test case among the whole catalogue."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from seqrec.artifacts import REFIT
from seqrec.config import EvaluateConfig
from seqrec.counts.search import Tables, fold_scorer
from seqrec.counts.term import with_counts
from seqrec.data.sequences import load as load_sequences
from seqrec.evaluation import cost, ranking, results
from seqrec.training import cards
from seqrec.training.checkpoint import counts_config, load_counts, load_model


def evaluate(
    *, model: str, sequences: Path, checkpoint: Path, report: Path, config: EvaluateConfig
) -> dict[str, float]:
    """Rank the validation and test cases with the trained `model`, and write metrics, cases and recommendations.

    Args:
        model: key in `models`.
        sequences: folder of the prepared dataset.
        checkpoint: folder of the trained weights.
        report: output folder.
        config: section `evaluate`.

    Raises:
        ValueError: the checkpoint belongs to another catalogue, or was trained on the cases.
    """
    net, card = load_model(checkpoint)
    if REFIT in card:
        raise ValueError(
            f"{checkpoint} was refitted on every event: it has seen the cases that it would be measured on"
        )
    cards.check_catalogue(checkpoint, card, sequences, users="user" in net.needs)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_sequences(sequences)
    prepared = loaded.to(device)
    facts = {"parameters": card["parameters"], "train_seconds": card["seconds"]}
    facts |= {"parameters/tables": cost.table_parameters(net), "query_flops": cost.query_flops(net)}
    chosen, term = card.get("counts", {}), load_counts(checkpoint, card)
    facts["counts/alpha"] = chosen.get("alpha", 0.0)
    began = time.monotonic()
    scorer, valid = ranking.model_scorer(net.to(device)), None
    if "folds" in chosen:
        valid = fold_scorer(scorer, Tables(loaded), [counts_config(fold) for fold in chosen["folds"]], device)
    both = with_counts(scorer, term and term.to(device))
    values = results.report(both, prepared, report, config, facts, valid=valid)
    return values | {"evaluate_seconds": time.monotonic() - began}
