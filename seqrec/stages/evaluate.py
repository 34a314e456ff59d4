"""The evaluate stage: ranks each validation and test case among the whole catalogue."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from seqrec.artifacts import REFIT, REFITTED
from seqrec.config import EvaluateConfig
from seqrec.counts.search import Tables, fold_scorer
from seqrec.counts.term import with_counts
from seqrec.data.sequences import load as load_sequences
from seqrec.evaluation import cost, ranking, results
from seqrec.training.checkpoint import Checkpoint, counts_config, load_checkpoint
from seqrec.training.held_out import held_out_now


def evaluate(
    *,
    model: str,
    sequences: Path,
    checkpoint: Path,
    report: Path,
    config: EvaluateConfig,
    filter_seen: bool = True,
    without_counts: bool = False,
) -> dict[str, float]:
    """Rank the validation and test cases with the trained `model`, and write metrics, cases and recommendations.

    Args:
        model: key in `models`.
        sequences: folder of the prepared dataset.
        checkpoint: folder of the trained weights.
        report: output folder.
        config: section `evaluate`.
        filter_seen: whether past items are removed from the candidates.
        without_counts: leave the count term out of the scores.

    Raises:
        ValueError: the checkpoint belongs to another catalogue, or was trained on the cases.
    """
    trained = load_checkpoint(checkpoint)
    net, card = trained.model, trained.card
    if REFIT in card:
        raise ValueError(f"{checkpoint} was refitted on the cases that it would rank: evaluate `finetuned` instead")
    trained.check_catalogue(sequences, users="user" in net.needs)
    if card.get("split") and (reason := held_out_now(trained, sequences)):
        raise ValueError(f"{checkpoint} may have been trained on the cases of {sequences}: {reason}; train it on these")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_sequences(sequences)
    prepared = loaded.to(device)
    facts = {"train_peak_mb": card.get("peak_bytes", 0) / 1e6}
    facts |= {"parameters/tables": cost.table_parameters(net), "query_flops": cost.query_flops(net)}
    chosen, term = ({}, None) if without_counts else (card["counts"], trained.count_term)
    facts["counts/alpha"] = chosen.get("alpha", 0.0)
    facts |= {"parameters": card["parameters"] or chosen.get("pairs", 0), "train_seconds": card["seconds"]}
    began = time.monotonic()
    scorer = ranking.model_scorer(net.to(device))
    test = valid = with_counts(scorer, term and term.to(device))
    if "folds" in chosen:
        folds = [counts_config(fold) for fold in chosen["folds"]]
        tables = Tables.of(loaded)
        tables.add_ease(term)
        valid = fold_scorer(scorer, tables, folds, device)
    count = None
    if config.refit != "none":
        refitted = _refitted(trained)
        term = None if without_counts else refitted.count_term
        test = with_counts(ranking.model_scorer(refitted.model.to(device)), term and term.to(device))
        count = torch.from_numpy(refitted.item_counts).to(device)
    values = results.report(test, prepared, report, config, facts, filter_seen=filter_seen, valid=valid, count=count)
    return values | {"evaluate_seconds": time.monotonic() - began}


def _refitted(trained: Checkpoint) -> Checkpoint:
    """Return the refit of a training on the validation events too."""
    folder = trained.folder / REFITTED
    if not folder.is_dir():
        raise ValueError(
            f"evaluate.refit: {trained.folder} has no refitted weights: run finetune with this setting first"
        )
    refitted = load_checkpoint(folder)
    origin = refitted.card[REFIT]
    if origin["until"] != "valid" or origin["fingerprint"] != trained.card["fingerprint"]:
        raise ValueError(f"{folder} is not a refit of {trained.folder} on the validation events: run finetune again")
    return refitted
