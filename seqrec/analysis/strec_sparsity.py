"""Accuracy and cost of a trained STRec when it is served with more or fewer rows than it was trained with."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from seqrec.data import sequences
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import metrics, ranking
from seqrec.models.base import SequenceModel
from seqrec.models.strec import STRec

CASES = 2_000
TIMED = 64  # histories
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model served with a given number of rows per layer."""

    sparsity: float  # share of rows that are not computed, the mean of the layers
    ndcg: float  # NDCG@10 on validation
    microseconds: float  # per history, from events to query, on this machine
    trained: bool  # whether these are the rows of its training


@torch.no_grad()
def sweep(model: SequenceModel, data: Sequences, *, filter_seen: bool, seed: int) -> list[Point]:
    """Return the points of `model` by sparsity, without new training; empty for a model that computes every row.

    Args:
        model: in eval mode, on the CPU.
        data: the prepared dataset; at most 2,000 of its validation cases are ranked.
        filter_seen: whether a user's past items are removed from the candidates.
        seed: seed of the draw of cases.
    """
    variants = model.serving_variants() if isinstance(model, STRec) else {}
    if not variants:
        return []
    cases = _draw(sequences.cases(data, "valid"), seed)
    trained, points = model.options, []
    for sparsity, options in sorted(variants.items(), key=lambda pair: pair[0]):
        model.options = options
        ranked = ranking.rank(ranking.model_scorer(model), data, cases, filter_seen=filter_seen, both=False)
        ndcg = float(metrics.ndcg(ranked.rank.numpy(), 10).mean())
        cost = _microseconds(model, data, cases)
        points.append(Point(sparsity=sparsity, ndcg=ndcg, microseconds=cost, trained=options is trained))
    model.options = trained
    return points


def _draw(cases: Cases, seed: int) -> Cases:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(cases), generator=generator)[:CASES].sort().values
    return Cases(user=cases.user[chosen], position=cases.position[chosen])


def _microseconds(model: SequenceModel, data: Sequences, cases: Cases) -> float:
    """Return the minimum time, over several rounds, of a pass over the longest histories."""
    longest = (cases.position - data.start[cases.user]).argsort(descending=True)[:TIMED]
    batch = sequences.window(data, cases.user[longest], cases.position[longest], model.options.length)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        model(batch, last=True)
        seconds.append(time.perf_counter() - began)
    return min(seconds) / len(longest) * 1e6
