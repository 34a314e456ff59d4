"""The baselines stage: two rows that need no training, and that any model must beat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from seqrec import evaluation
from seqrec.config import EvaluateConfig
from seqrec.data import sequences as data
from seqrec.data.sequences import Sequences
from seqrec.retrieval import ITEMS_PER_BLOCK, Blocks, Scorer

VOTES = 5  # past items that vote
REACH = 10  # events after an item that count as following it


def baselines(*, sequences: Path, reports: Path, config: EvaluateConfig) -> dict[str, float]:
    """Evaluate `popularity` and `markov` as if they were models, into folders of `reports`.

    Popularity ranks by the number of events in train. Markov counts, over train, how often an item follows another
    within ten events, weighted by 1 / distance and tempered by the square root of the first item's total; the user's
    last five items vote, weighted by 1 / age.

    Args:
        sequences: folder of the prepared dataset.
        reports: folder that receives a folder each.
        config: section `evaluate`.
    """
    prepared = data.load(sequences)
    scorers = {"popularity": popularity_scorer(prepared), "markov": markov_scorer(prepared)}
    values = {}
    for name, scorer in scorers.items():
        facts = {"parameters": 0, "train_seconds": 0.0}
        metrics = evaluation.report(scorer, prepared, reports / name, config, facts)
        values[f"{name}/test/ndcg@10"] = metrics["test/ndcg@10"]
    return values


def popularity_scorer(prepared: Sequences) -> Scorer:
    """Return a scorer that ranks by train events, the same for everybody."""
    count = prepared.count.float()

    def scorer(_: Sequences, user: Tensor, __: Tensor) -> Blocks:
        def blocks() -> Iterator[tuple[int, Tensor]]:
            for first in range(1, len(count), ITEMS_PER_BLOCK):
                yield first, count[first : first + ITEMS_PER_BLOCK].repeat(len(user), 1)

        return blocks

    return scorer


def markov_scorer(prepared: Sequences) -> Scorer:
    """Return a scorer by decayed co-occurrence with the last items."""
    follows = _follow_counts(prepared)
    decay = 1 / torch.arange(VOTES, 0, -1)

    def scorer(source: Sequences, user: Tensor, stop: Tensor) -> Blocks:
        items = data.window(source, user, stop, VOTES).items
        weight = (decay * (items > 0)).flatten().numpy()
        rows = np.repeat(np.arange(len(user)), VOTES)
        votes = sparse.csr_array((weight, (rows, items.flatten().numpy())), shape=(len(user), len(source.count)))
        scores = votes @ follows

        def blocks() -> Iterator[tuple[int, Tensor]]:
            for first in range(1, len(source.count), ITEMS_PER_BLOCK):
                yield first, torch.from_numpy(scores[:, first : first + ITEMS_PER_BLOCK].toarray().astype(np.float32))

        return blocks

    return scorer


def _follow_counts(prepared: Sequences) -> sparse.csr_array:
    """Return (V, V): decayed counts of the column's item after the row's in train, rows tempered."""
    size = len(prepared.count)
    length = prepared.stop - prepared.start
    train = torch.arange(len(prepared.items)) < torch.repeat_interleave(prepared.train_stop, length)
    user = torch.repeat_interleave(torch.arange(prepared.num_users), length)[train].numpy()
    items = prepared.items[train].numpy()
    total = sparse.csr_array((size, size), dtype=np.float64)
    for step in range(1, REACH + 1):
        same = user[step:] == user[:-step]
        pair = (items[:-step][same], items[step:][same])
        weight = np.full(len(pair[0]), 1 / step)
        total = total + sparse.csr_array((weight, pair), shape=(size, size))
    tempered = 1 / np.sqrt(np.maximum(total.sum(axis=1), 1e-12))
    return sparse.csr_array(sparse.diags_array(tempered) @ total)
