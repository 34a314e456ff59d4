"""Ranks validation cases with a model that was trained on an earlier dump of the dataset.

Items and users are matched by their external ids. The model does not know the new ones: a new item gets the lowest
score and is skipped in a history, and a new user is user 0, as in serving/recommender.py.

Shape suffixes: B rows   L events   V items of the dataset with padding (0)   M items of the model with padding (0)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from seqrec.artifacts import USERS, VOCABULARY, read_table
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.evaluation import metrics, ranking, results
from seqrec.evaluation.ranking import ITEMS_PER_BLOCK, POSITIONS_PER_PASS, SCORES_IN_MEMORY, ScoreBlocks, Scorer
from seqrec.models.base import Batch
from seqrec.serving.torch_engine import TorchEngine
from seqrec.training.checkpoint import Checkpoint

LOWEST = torch.finfo(torch.float32).min  # finite: a score that is not finite is an error
TOP = 10  # length of the lists of which the coverage is taken


@dataclass(frozen=True)
class Numbers:
    """The model's numbers of the dataset's items and users; 0 where the model does not know them."""

    item: Tensor  # (V,) int64
    user: Tensor  # (U,) int64

    @classmethod
    def matched(cls, checkpoint: Checkpoint, data: Path, device: torch.device) -> Numbers:
        """Match the items and users of the prepared dataset in `data` with the model's."""
        item = _matched(checkpoint.vocabulary["item_id"], read_table(data / VOCABULARY, ["item_id"])["item_id"])
        user = _matched(checkpoint.users["user_id"], read_table(data / USERS, ["user_id"])["user_id"])
        return cls(torch.nn.functional.pad(item, (1, 0)).to(device), user.to(device))


def _matched(known: pa.ChunkedArray, ids: pa.ChunkedArray) -> Tensor:
    number = pc.add(pc.fill_null(pc.index_in(ids, value_set=known.combine_chunks()), -1), 1)
    return torch.tensor(number.to_numpy(zero_copy_only=False), dtype=torch.int64)


@dataclass(frozen=True)
class Measured:
    """What a model reaches on the validation cases of a dataset."""

    cases: pa.Table  # artifacts.CASES_SCHEMA
    values: dict[str, float]  # coverage, and NDCG on rare items
    new_items: int = 0  # which the model does not know
    new_users: int = 0


def measured(checkpoint: Checkpoint, data: Path, *, filter_seen: bool) -> Measured:
    """Rank the validation cases of the prepared dataset in `data` with a model.

    Raises:
        ValueError: the model knows no item of the dataset.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers = Numbers.matched(checkpoint, data, device)
    if not numbers.item.any():
        raise ValueError("the champion knows none of the items of the dataset")
    term, prepared = checkpoint.count_term, sequences.load(data).to(device)
    count = torch.from_numpy(checkpoint.item_counts).to(device)
    chosen = sequences.cases(prepared, "valid")
    ranked = ranking.rank(
        scorer(TorchEngine(checkpoint.model.to(device), term and term.to(device)), numbers, count),
        replace(prepared, count=count[numbers.item].masked_fill(numbers.item == 0, -1)),  # ranks empty histories
        chosen,
        filter_seen=filter_seen,
        both=False,
        top_k=TOP,
        rows=max(1, min(1024, SCORES_IN_MEMORY // max(len(count), len(numbers.item)))),
        name=checkpoint.card["model"],
    )
    shown = ranked.top.masked_fill(numbers.item[ranked.top] == 0, 0)
    values = {"valid/coverage@10": metrics.list_metrics(shown, prepared.count)["coverage"]}
    target = prepared.items[chosen.position].long()
    tail = (prepared.count[target] > 0) & ~metrics.head_items(prepared.count)[target]
    if tail.any():
        values["valid/ndcg@10/popularity=tail"] = float(metrics.ndcg(ranked.rank[tail].cpu().numpy(), 10).mean())
    return Measured(
        cases=results.case_table("valid", prepared, chosen, ranked.rank, ranked.ties),
        values=values,
        new_items=int((numbers.item[1:] == 0).sum()),
        new_users=int((numbers.user == 0).sum()),
    )


def scorer(engine: TorchEngine, numbers: Numbers, count_M: Tensor) -> Scorer:
    """Return the scorer of a model that was trained on another catalogue; it holds all scores of a block in memory.

    Args:
        engine: the model.
        numbers: the model's numbers of the dataset's items and users.
        count_M: number of training events of each item; the scores where the model knows no item of the history.
    """
    reads = engine.reads

    def scored(data: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
        history = known_history(data, user, stop, numbers, reads.events, from_request=reads.from_request)
        rows = max(1, POSITIONS_PER_PASS // history.items.shape[1])
        parts = map(Batch, *(tensor.split(rows) for tensor in history))
        score_BM = torch.cat([engine.of_queries(engine.queries(part), part.items) for part in parts])
        score_BM[(history.items == 0).all(1)] = count_M.to(score_BM)
        score_BM[:, 0] = LOWEST

        def blocks() -> Iterator[tuple[int, Tensor]]:
            for first in range(1, len(numbers.item), ITEMS_PER_BLOCK):
                yield first, score_BM[:, numbers.item[first : first + ITEMS_PER_BLOCK]]

        return blocks

    return scored


def known_history(
    data: Sequences, user: Tensor, stop: Tensor, numbers: Numbers, length: int, *, from_request: bool
) -> Batch:
    """Return the last `length` events with known items before `stop` (B,) of each `user` (B,), in the model's numbers.

    Times are relative to the last of these events or, with `from_request`, to the event at `stop`; histories are padded
    on the left.
    """
    row, event = sequences.ranges(data.start[user], stop - data.start[user])
    item = numbers.item[data.items[event].long()]
    known = item > 0
    row, event, item = row[known], event[known], item[known]
    kept = torch.bincount(row, minlength=len(user))
    end = kept.cumsum(0)
    width = sequences.padded_width(int(kept.max()), length)
    column = torch.arange(len(row), device=user.device) - end[row] + width
    inside = column >= 0
    cell = (row[inside], column[inside])
    items_BL = torch.zeros(len(user), width, dtype=torch.int64, device=user.device)
    times_BL = torch.zeros(len(user), width, dtype=torch.float64, device=user.device)
    items_BL[cell] = item[inside]
    times = data.times[event]
    origin = data.times[stop[row]] if from_request else times[end[row] - 1]
    times_BL[cell] = (times - origin).double()[inside]
    return Batch(items_BL, times_BL, numbers.user[user])
