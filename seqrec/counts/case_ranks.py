"""Ranks of the targets of some cases under many count terms; the scores without a term are computed once.

Shape suffixes: B cases of a block   C cases   V items with padding (0)   W weights
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from seqrec.counts.term import CountTerm
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import ranking
from seqrec.evaluation.metrics import FloatArray
from seqrec.evaluation.ranking import ScoreBlocks, Scorer, SeenItems

CASES_AT_ONCE = 1_024  # whose histories a model on a GPU encodes in one pass
CELLS_AT_ONCE = 1_000_000  # scores of a block, which stay in the caches
SCORES = 60_000_000  # maximum number of scores, and of sums, that are kept, 240 MB each; others are computed again


class CaseRanks:
    """Ranks the targets of fixed cases by base scores with a count term added."""

    def __init__(self, base: Scorer, data: Sequences, cases: Cases, *, filter_seen: bool) -> None:
        """Store the cases to rank, each with a history; `data` is on the device of `base`."""
        self.base, self.data, self.cases, self.filter_seen = base, data, cases, filter_seen
        at_once = max(1, min(CASES_AT_ONCE, CELLS_AT_ONCE // data.num_items))
        self.rows = ranking.case_blocks(cases.position - data.start[cases.user], at_once)
        self.keeps = len(cases) * data.num_items <= SCORES
        self.kept: dict[int, Tensor] = {}
        self.term: CountTerm | None = None  # whose sums are kept
        self.sums: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, term: CountTerm, alpha: float = 1.0, popularity: float = 0.0) -> FloatArray:
        """Return the mid-ranks (C,) of the targets with `alpha` times `term` and popularity added to the base scores.

        The sums of the last `term` are kept, so that other weights of the same object cost little.
        """
        if term is not self.term:
            self.term, self.sums = term, {}
        term, ranks = term.to(self.data.device), [torch.empty(0, dtype=torch.float64)]
        for first, user, stop, target_B1, base_BV in self._blocks(self.keeps):
            if (sum_BV := self.sums.get(first)) is None:
                sum_BV = term.adder(term.histories(self.data, user, stop))(torch.zeros_like(base_BV), 0)
                if self.keeps:
                    self.sums[first] = sum_BV
            score_BV = torch.add(base_BV, sum_BV, alpha=alpha)
            if popularity:
                score_BV += popularity * term.log_popularity
            ranks.append(_ranks(score_BV, target_B1))
        return torch.cat(ranks).numpy()

    @torch.no_grad()
    def weighted(self, term: CountTerm, weights: Sequence[float]) -> FloatArray:
        """Return the mid-ranks (W, C) with `term` times each weight added to the base scores."""
        term = term.to(self.data.device)
        ranks = [torch.empty(len(weights), 0, dtype=torch.float64)]
        for _, user, stop, target_B1, base_BV in self._blocks(keeps=False):
            vote_BV = term.adder(term.histories(self.data, user, stop))(torch.zeros_like(base_BV), 0)
            scores = (torch.add(base_BV, vote_BV, alpha=weight) for weight in weights)
            ranks.append(torch.stack([_ranks(score_BV, target_B1) for score_BV in scores]))
        return torch.cat(ranks, 1).numpy()

    def _blocks(self, keeps: bool) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """Yield first row, user, stop, target (B, 1) and base scores (B, V) of each block; `keeps` the scores."""
        for rows in self.rows:
            user, stop = self.cases.user[rows], self.cases.position[rows]
            target_B1 = self.data.sent(self.data.items[stop].long().unsqueeze(1))
            if (base_BV := self.kept.get(rows.start)) is None:
                base_BV = self._base(user, stop, target_B1)
                if keeps:
                    self.kept[rows.start] = base_BV
            yield rows.start, user, stop, target_B1, base_BV

    def _base(self, user: Tensor, stop: Tensor, target_B1: Tensor) -> Tensor:
        """Return the base scores (B, V) of a block; items that are no candidates have -inf."""
        blocks = ranking.checked(self.base, self.data, user, stop, "the model")()
        base_BV = F.pad(torch.cat([score for _, score in blocks], 1), (1, 0), value=float("-inf"))
        if self.filter_seen:
            seen = SeenItems.before(self.data, user, stop).without(target_B1.squeeze(1))
            base_BV[seen.within(0, base_BV)] = float("-inf")
        return base_BV


def _ranks(score_BV: Tensor, target_B1: Tensor) -> Tensor:
    goal_B1 = score_BV.gather(1, target_B1)
    above, equal = (ranking.per_row(beats(score_BV, goal_B1)) for beats in (torch.gt, torch.eq))
    return ranking.mid_rank(above, equal).cpu()


def remembered(scorer: Scorer) -> Scorer:
    """Return a model's `scorer` with a cache by cases; it holds queries, as scores would need more memory."""
    known: dict[tuple[int, ...], ScoreBlocks] = {}

    def again(data: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
        key = tuple(stop.tolist())
        if key not in known:
            known[key] = scorer(data, user, stop)
        return known[key]

    return again
