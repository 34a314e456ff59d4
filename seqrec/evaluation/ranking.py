"""Exact ranking over the whole catalogue.

Scores are computed in blocks of users x items; the full matrix is never in memory. A target and its rivals are scored
by the same matrix product, so that equal vectors tie exactly. Scores that are not finite raise an error: comparisons
with NaN are false, so a model whose scores are all NaN would rank every target first.

Cases with an empty history are ranked by popularity, whatever the scorer: an item's score is its number of training
events. serving/recommender.py follows the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from seqrec.data import sequences
from seqrec.data.sequences import Cases, Sequences
from seqrec.models.base import PAD, SequenceModel

SCORES_IN_MEMORY = 16_000_000  # floats per block
ITEMS_PER_BLOCK = 1_048_576
EVENTS_IN_MEMORY = 4_000_000  # of the histories in a block
POSITIONS_PER_PASS = 8_192  # on a CPU, so that the activations of a forward pass stay in its caches

# pairs of first item and scores (B, block), which cover items 1..V-1 in order
ScoreBlocks = Callable[[], Iterator[tuple[int, Tensor]]]
Scorer = Callable[[Sequences, Tensor, Tensor], ScoreBlocks]  # called with data, user (B,), stop (B,)


@dataclass(frozen=True)
class Ranking:
    """The ranks (C,) of the targets of some cases, and the best items of each case."""

    rank: Tensor  # float64, 1-based mid-rank among unseen items; the target is always a candidate
    rank_unfiltered: Tensor  # float64, among all items
    rank_sampled: Tensor  # float64, among the negatives stored with the split; NaN without them
    ties: Tensor  # int64, number of other candidates with the target's score, under the configured filter
    top: Tensor  # (C, K) int64, best items under the configured filter, a seen target not among them, filled up with 0
    score: Tensor  # (C, K) float32


@dataclass(frozen=True)
class SeenItems:
    """The filter of seen items: the distinct items in the history of each row of a block of cases."""

    row: Tensor  # (S,) int64, 0..B-1
    item: Tensor  # (S,) int64

    @classmethod
    def before(cls, data: Sequences, user: Tensor, stop: Tensor) -> SeenItems:
        """Return the items before the flat index `stop` (B,) of each `user` (B,).

        The history of a user with several cases is read once: a single user may have most of the log.
        """
        size, (users, of_user) = data.num_items + 1, user.unique(return_inverse=True)
        if len(users) == len(user):
            row, item = sequences.seen(data, user, stop)
            distinct = torch.unique(row * size + item)
            return cls(distinct // size, distinct % size)
        longest = torch.zeros_like(users).scatter_reduce(0, of_user, stop, "amax")
        place, event = sequences.ranges(data.start[users], longest - data.start[users])
        pair, order = torch.sort(place * size + data.items[event].long(), stable=True)
        first = F.pad(pair.diff() != 0, (1, 0), value=True)[: len(pair)]  # a user's first event with an item
        pair, event = pair[first], event[order[first]]
        number = torch.bincount(pair // size, minlength=len(users))
        row, entry = sequences.ranges((number.cumsum(0) - number)[of_user], number[of_user])
        past = event[entry] < stop[row]
        return cls(data.sent(row[past]), data.sent(pair[entry[past]] % size))

    def without(self, target_B: Tensor) -> SeenItems:
        """Return the seen items without each row's target, which remains a candidate."""
        rival = self.item != target_B[self.row]
        return SeenItems(self.row[rival], self.item[rival])

    def within(self, first: int, score: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column of the seen items in `score` (B, N), whose first column is item `first`."""
        inside = (self.item >= first) & (self.item < first + score.shape[1])
        return self.row[inside], self.item[inside] - first


def mid_rank(above: Tensor, equal: Tensor) -> Tensor:
    """Return the mid-rank of targets, from the numbers of candidates scored `above` and `equal` (with the target).

    >>> mid_rank(torch.tensor([0, 2]), torch.tensor([1, 4])).tolist()
    [1.0, 4.5]
    """
    return 1 + above.double() + (equal.double() - 1) / 2


def model_scorer(model: SequenceModel, known_U: Tensor | None = None) -> Scorer:
    """Return the scorer of `model`, in eval mode: one forward pass, then inner products with blocks of item vectors.

    `known_U` says whether each user has a training window; the others are ranked as user 0. It is needed only during a
    training, because at its end they get the vector of user 0.
    """
    item_VD = model.item_vectors().detach().float()

    @torch.no_grad()  # whoever keeps the queries would keep the graph of the forward pass too: gigabytes
    def encode(data: Sequences, user: Tensor, stop: Tensor, longest: int) -> Tensor:
        width = sequences.padded_width(longest, model.options.history)
        batch = sequences.window(data, user, stop, width, from_request=model.options.from_request)
        if known_U is not None:
            batch = batch._replace(user=torch.where(data.sent(known_U[user]), batch.user, 0))
        return model(model.asked(batch), last=True)[:, 0].float()

    def scorer(data: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
        length = (stop - data.start[user]).clamp(max=model.options.length)
        rows = len(user) if data.device.type != "cpu" else max(1, POSITIONS_PER_PASS // max(1, int(length.max())))
        parts = zip(user.split(rows), stop.split(rows), length.split(rows), strict=True)
        query_BD = torch.cat([encode(data, users, stops, int(longest.max())) for users, stops, longest in parts])

        def blocks() -> Iterator[tuple[int, Tensor]]:
            for first in range(1, len(item_VD), ITEMS_PER_BLOCK):
                yield first, query_BD @ item_VD[first : first + ITEMS_PER_BLOCK].T

        return blocks

    return scorer


@torch.no_grad()
def rank(
    scorer: Scorer,
    data: Sequences,
    cases: Cases,
    *,
    filter_seen: bool,
    both: bool = True,
    top_k: int = 0,
    rows: int = 0,
    name: str = "the model",
) -> Ranking:
    """Rank the target of each case among all items.

    Args:
        scorer: scores a block of cases.
        data: the prepared dataset.
        cases: the cases to rank.
        filter_seen: whether `ties` and `top` leave out the user's past items.
        both: whether `rank` leaves out seen items even without `filter_seen`; otherwise it then equals
            `rank_unfiltered`, and no history is read.
        top_k: length of the lists in `top`.
        rows: cases per block; 0: as many as memory allows.
        name: name of the model or baseline, for the error message.

    Raises:
        ValueError: a score is not finite.
    """
    # sorted by length, so that short histories are not padded to long ones
    length, order = (cases.position - data.start[cases.user]).sort(stable=True)
    user, position = cases.user[order], cases.position[order]
    parts = [
        _rank_block(scorer, data, user[block], position[block], filter_seen, both or filter_seen, top_k, name)
        for block in case_blocks(length, rows or _rows(data))
    ]
    if not parts:
        empty = torch.zeros(0, dtype=torch.float64)
        lists = empty.long().reshape(0, top_k)
        return Ranking(empty, empty, empty, empty.long(), lists, lists.float())
    as_given = order.argsort()
    return Ranking(*(torch.cat(column)[as_given] for column in zip(*parts, strict=True)))


@torch.no_grad()
def best(
    scorer: Scorer, data: Sequences, user: Tensor, stop: Tensor, *, filter_seen: bool, top_k: int
) -> tuple[Tensor, Tensor]:
    """Return best items (B, K), filled up with 0, and scores, given each `user`'s events before `stop` (B,).

    Of items with equal scores, the one with the lower number comes first. If the best score is 0, a baseline has
    counted nothing after the history, and its items are the popular ones. Both are as in serving/recommender.py.

    Raises:
        ValueError: a score is not finite.
    """
    length, order = (stop - data.start[user]).sort(stable=True)
    chosen = (order[block] for block in case_blocks(length, _rows(data)))
    parts = [_counted_block(scorer, data, user[some], stop[some], filter_seen, top_k) for some in chosen]
    score_BK, item_BK = (torch.cat(column)[order.argsort()] for column in zip(*parts, strict=True))
    return torch.where(score_BK == float("-inf"), PAD, item_BK), score_BK


def _counted_block(
    scorer: Scorer, data: Sequences, user: Tensor, stop: Tensor, filter_seen: bool, top_k: int
) -> tuple[Tensor, Tensor]:
    found = _best_block(scorer, data, user, stop, filter_seen, top_k)
    uncounted = (found[0][:, 0] == 0).nonzero().squeeze(1)
    if len(uncounted):
        popular = _best_block(_popularity, data, user[uncounted], stop[uncounted], filter_seen, top_k)
        for of_all, of_popularity in zip(found, popular, strict=True):
            of_all[uncounted] = of_popularity
    return found


def _popularity(data: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
    return lambda: (
        (first, data.count[first : first + ITEMS_PER_BLOCK].float().repeat(len(user), 1))
        for first in range(1, len(data.count), ITEMS_PER_BLOCK)
    )


def _best_block(
    scorer: Scorer, data: Sequences, user: Tensor, stop: Tensor, filter_seen: bool, top_k: int
) -> tuple[Tensor, Tensor]:
    seen = SeenItems.before(data, user, stop) if filter_seen else None
    none = torch.empty(len(user), 0, device=data.device)
    found = (none, none.long())
    for first, score in checked(scorer, data, user, stop, "the model")():
        if seen is not None:
            score[seen.within(first, score)] = float("-inf")
        found = _merge_top(found, score, first, top_k)
    return found


def checked(scorer: Scorer, data: Sequences, user: Tensor, stop: Tensor, name: str) -> ScoreBlocks:
    """Return the scores of `scorer` for some cases, checked to be finite; with an empty history, popularity."""
    new = data.sent((stop == data.start[user]).nonzero().squeeze(1))
    blocks = scorer(data, user, stop)

    def checked() -> Iterator[tuple[int, Tensor]]:
        for first, score in blocks():
            if len(new):
                score[new] = data.count[first : first + score.shape[1]].to(score)
            low, high = score.aminmax()  # NaN passes through
            if not bool(low.isfinite() & high.isfinite()):
                last = first + score.shape[1] - 1
                row = int((~score.isfinite()).any(1).nonzero()[0])
                raise ValueError(
                    f"the scores of {name} are not finite (NaN or infinity) for items {first} to {last} and user "
                    f"{int(user[row]) + 1}: its weights are damaged or its training diverged; train it again, with a "
                    "smaller learning_rate"
                )
            yield first, score

    return checked


def _kept(blocks: ScoreBlocks) -> ScoreBlocks:
    kept = list(blocks())
    return lambda: iter(kept)


def _rows(data: Sequences) -> int:
    return max(1, min(1024, SCORES_IN_MEMORY // min(data.num_items, ITEMS_PER_BLOCK)))


def case_blocks(length: Tensor, rows: int) -> list[slice]:
    """Return consecutive blocks of at most `rows` cases, whose histories have EVENTS_IN_MEMORY events at most in total.

    `length` are the events in the history of each case; a longer history than the maximum is a block of its own.
    """
    blocks: list[slice] = []
    total = length.cpu().cumsum(0)
    while (first := blocks[-1].stop if blocks else 0) < len(total):
        before = total[first - 1] if first else 0
        fitting = int((total[first : first + rows] - before <= EVENTS_IN_MEMORY).sum())
        blocks.append(slice(first, first + max(1, fitting)))
    return blocks


def repeats(data: Sequences, cases: Cases) -> Tensor:
    """Return bool (C,): the cases whose target is in the history, so that a list without seen items cannot have it."""
    found = torch.zeros(len(cases), dtype=torch.bool)
    for rows in case_blocks(cases.position - data.start[cases.user], _rows(data)):
        past = SeenItems.before(data, cases.user[rows], cases.position[rows])
        target = data.sent(data.items[cases.position[rows]].long())
        found[rows][past.row[past.item == target[past.row]].cpu()] = True
    return found


def _rank_block(
    scorer: Scorer, data: Sequences, user: Tensor, stop: Tensor, filter_seen: bool, reads: bool, top_k: int, name: str
) -> tuple[Tensor, ...]:
    target = data.sent(data.items[stop].long())
    past = SeenItems.before(data, user, stop) if reads else SeenItems(target[:0], target[:0])
    seen = past.without(target)
    blocks = checked(scorer, data, user, stop, name)
    if data.num_items <= ITEMS_PER_BLOCK:  # keep the single block instead of computing it twice
        blocks = _kept(blocks)
    goal = _scores_of(blocks, target.unsqueeze(1))
    sampled = torch.full((len(user),), float("nan"), dtype=torch.float64, device=goal.device)
    if data.negatives is not None:
        rival = _scores_of(blocks, data.sent(data.negatives[user].long()))
        sampled = mid_rank((rival > goal).sum(1), 1 + (rival == goal).sum(1))
    # numbers of items with a higher or the same score: of all items, and of those that are seen
    all_above, all_equal, seen_above, seen_equal = goal.new_zeros(4, len(user), dtype=torch.int64)
    best = (goal.new_empty(len(user), 0), target.new_empty(len(user), 0))
    for first, score in blocks():
        all_above += per_row(score > goal)
        all_equal += per_row(score == goal)
        row, column = seen.within(first, score)
        scored = score[row, column]
        seen_above += torch.bincount(row[scored > goal[row, 0]], minlength=len(user))
        seen_equal += torch.bincount(row[scored == goal[row, 0]], minlength=len(user))
        if top_k:
            if filter_seen:
                score[past.within(first, score)] = float("-inf")
            best = _merge_top(best, score, first, top_k)
    above, equal = all_above - seen_above, all_equal - seen_equal
    ties = (equal if filter_seen else all_equal) - 1
    top = torch.where(best[0] == float("-inf"), PAD, best[1])
    return mid_rank(above, equal), mid_rank(all_above, all_equal), sampled, ties, top, best[0]


def per_row(true_BI: Tensor) -> Tensor:
    """Return the number of true entries in each row; on the host by numpy, six times as fast as torch."""
    if true_BI.device.type != "cpu":
        return true_BI.sum(1)
    return torch.from_numpy(np.count_nonzero(true_BI.numpy(), axis=1))


def _scores_of(blocks: ScoreBlocks, item_BN: Tensor) -> Tensor:
    """Return the scores (B, N) of the given items, collected from the blocks."""
    goal = torch.full(item_BN.shape, float("nan"), device=item_BN.device)
    for first, score in blocks():
        column = item_BN - first
        inside = (column >= 0) & (column < score.shape[1])
        goal = torch.where(inside, score.gather(1, column.clamp(0, score.shape[1] - 1)), goal)
    return goal


def _merge_top(best: tuple[Tensor, Tensor], score: Tensor, first: int, k: int) -> tuple[Tensor, Tensor]:
    value, index = _top(score, k)
    merged_value, merged_item = torch.cat([best[0], value], 1), torch.cat([best[1], index + first], 1)
    value, order = _top(merged_value, k)
    return value, merged_item.gather(1, order)


def _top(score_BV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each row's `k` largest scores and their columns; of equal scores, those of the first columns."""
    value_BK, column_BK = score_BV.topk(min(k + 1, score_BV.shape[1]), dim=1)
    tied = (value_BK[:, k - 1 : k] == value_BK[:, k:]).any(1).nonzero().squeeze(1)  # rows with a tie for the last place
    value_BK, column_BK = value_BK[:, :k], column_BK[:, :k]
    if len(tied):  # places of the last value get its first columns
        value_TK, column_TK = value_BK[tied], column_BK[tied]
        last_TK = value_TK == value_TK[:, -1:]
        equal = (score_BV[tied] == value_TK[:, -1:]).view(-1).nonzero().squeeze(1)
        start = torch.searchsorted(equal, torch.arange(len(tied), device=equal.device) * score_BV.shape[1])
        _, place = sequences.ranges(start, last_TK.sum(1))
        column_TK[last_TK] = equal[place] % score_BV.shape[1]
        column_BK[tied] = column_TK
    column_BK, order_BK = column_BK.sort(dim=1)
    value_BK, order_BK = value_BK.gather(1, order_BK).sort(dim=1, descending=True, stable=True)
    return value_BK, column_BK.gather(1, order_BK)
