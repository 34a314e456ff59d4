"""Baselines that only count: PCTM and Sequential Rules.

PCTM (Petrov et al., RecSys 2026): the count term with alpha 1. Deviations: the values are chosen on validation from one
grid, the history has ten events, and events have weights rho^j; the paper uses a grid per dataset and two kinds of
weights. Sequential Rules (Ludewig and Jannach, UMUAI 2018): R_ba is a sum of distance weights without smoothing, and
the newest events vote with decaying weights. As in Petrov et al., rules can be scaled by the rarity of their source.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqrec.artifacts import CHOSEN, write_json
from seqrec.config import CountsConfig, EvaluateConfig
from seqrec.counts import search
from seqrec.counts.case_ndcg import CaseNdcg
from seqrec.counts.search import ALONE, Axis, Choice, Tables
from seqrec.counts.table import CountTable
from seqrec.counts.term import CountTerm, by_halves, kernel, log_popularity, nothing, with_counts
from seqrec.data.sequences import Sequences
from seqrec.evaluation import results
from seqrec.evaluation.ranking import Scorer

ROWS = ("pctm", "seqrules")


@dataclass(frozen=True, kw_only=True)
class RulesConfig:
    """Settings of Sequential Rules."""

    kernel: str = "inverse"  # weight by distance, see `term.kernel`
    window: int = 10
    decay: str = "inverse"  # weights of the voting events, newest first; see `term.kernel`
    events: int = 10
    rarity: bool = False  # scale the rules of an item by its inverse document frequency, normalised to 0..1


RULES: tuple[Axis, ...] = (
    [{"kernel": k, "window": window} for k in ("inverse", "root", "square") for window in (10, 20)],
    [{"decay": decay} for decay in ("inverse", "root", "square", "0.65")],
    [{"rarity": rarity} for rarity in (False, True)],
)


def report(
    name: str, data: Sequences, fitted: Sequences, directory: Path, config: EvaluateConfig, *, filter_seen: bool = True
) -> dict[str, float]:
    """Choose the settings of baseline `name` on validation, write them, and report it like any model.

    Args:
        name: one of ROWS.
        data: the prepared dataset; its training events are counted for the validation cases.
        fitted: the same dataset; its training events are counted for the test cases.
        directory: receives the results.
        config: section `evaluate`.
        filter_seen: whether past items are removed from the candidates.
    """
    began, tables = time.monotonic(), Tables(data)
    start, axes = (CountsConfig(), ALONE) if name == "pctm" else (RulesConfig(), RULES)
    cases = search.drawn_cases(data, tables)
    ndcg = CaseNdcg(nothing, data, cases, filter_seen=filter_seen)
    choice: Choice[Any] = search.search(lambda values: ndcg(_term(tables, values)), cases.user, start, axes)
    even, odd = (_scorer(tables, fold) for fold in choice.folds)
    stored = len(_table(tables, choice.values).targets)
    facts = {"parameters": stored, "train_seconds": time.monotonic() - began}
    write_json(directory / CHOSEN, {"chosen": choice.card(), "grid": [list(axis) for axis in axes], "pairs": stored})
    test = _scorer(tables if fitted is data else Tables(fitted), choice.values)
    shown: dict[str, Any] = {"filter_seen": filter_seen, "valid": by_halves(even, odd), "count": fitted.count}
    return results.report(test, data, directory, config, facts, **shown)


def _term(tables: Tables, values: Any) -> CountTerm:
    return (
        rules(tables.data, values, _table(tables, values)) if isinstance(values, RulesConfig) else tables.built(values)
    )


def _scorer(tables: Tables, values: Any) -> Scorer:
    return with_counts(nothing, _term(tables, values))


def rules(data: Sequences, config: RulesConfig, table: CountTable) -> CountTerm:
    """Return Sequential Rules as a count term, which sums counts rather than their logarithms."""
    values = table.values
    if config.rarity:
        values = values * torch.repeat_interleave(_rarity(data), table.offsets.diff())
    return CountTerm(
        offsets=table.offsets,
        targets=table.targets,
        values=values,
        weights=kernel(config.decay, config.events).float(),
        log_popularity=log_popularity(data),
    )


def _table(tables: Tables, config: Any) -> CountTable:
    """Return the count table for a CountsConfig or a RulesConfig."""
    shared = {} if isinstance(config, CountsConfig) else {"kernel": config.kernel, "window": config.window}
    return tables.table(replace(config) if isinstance(config, CountsConfig) else CountsConfig(**shared))


def _rarity(data: Sequences) -> Tensor:
    """Return (V,): -log of each item's training events, scaled to 0 for the most frequent and 1 for the rarest item."""
    rare = -data.count.clamp(min=1).log()
    low, high = rare[1:].min(), rare[1:].max()
    return torch.ones_like(rare) if high == low else (rare - low) / (high - low)
