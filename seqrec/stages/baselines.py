"""The baselines stage: methods without gradient training, which any model must beat."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import linalg, sparse
from torch import Tensor

from seqrec.config import EvaluateConfig
from seqrec.config.ranges import Count
from seqrec.counts import baselines as counting
from seqrec.counts.table import train_events
from seqrec.data.sequences import Sequences, cases, seen, trained_until, window
from seqrec.data.sequences import load as load_sequences
from seqrec.evaluation import results
from seqrec.evaluation.ranking import ITEMS_PER_BLOCK, ScoreBlocks, Scorer

logger = logging.getLogger(__name__)
VOTES = 5  # number of past items that vote
REACH = 10  # maximum distance of two counted events
RIDGE = 100.0  # L2 of EASE: best on validation of ML-100K, 2 % below the best value, 250, on ML-1M
EASE_ITEMS = 20_000  # its item x item matrices then take 10 GB, and minutes


def baselines(
    *,
    sequences: Path,
    reports: Path,
    config: EvaluateConfig,
    filter_seen: bool = True,
    ease_items: Count = EASE_ITEMS,
) -> dict[str, float]:
    """Evaluate the baselines `popularity`, `markov`, `ease`, `pctm` and `seqrules` as models are evaluated.

    Popularity ranks by the number of training events. Markov counts how often an item follows another within ten
    training events, weighted by 1 / distance and divided by the square root of the first item's total; the user's last
    five items vote, weighted by 1 / age. EASE is the best linear map from a user's items to these items, where no item
    explains itself; it is left out for large catalogues. PCTM and Sequential Rules are those of
    seqrec/counts/baselines.py, with settings chosen on validation.

    Args:
        sequences: folder of the prepared dataset.
        reports: output folder, with a folder for each baseline.
        config: section `evaluate`.
        filter_seen: whether past items are removed from the candidates.
        ease_items: largest catalogue for which EASE is computed.

    Raises:
        ValueError: the split has no validation or no test cases.
    """
    prepared = load_sequences(sequences)
    for split in ("valid", "test"):
        if not len(cases(prepared, split)):
            raise ValueError(f"no {split} cases: check prepare.protocol, prepare.{split}_share and the k-core")
    fitted = prepared if config.refit == "none" else trained_until(prepared, prepared.valid_stop)
    scorers = {"popularity": popularity_scorer, "markov": markov_scorer, "ease": ease_scorer}
    values = {}
    for name in (*scorers, *counting.ROWS):
        shutil.rmtree(reports / name, ignore_errors=True)  # may be of other data
        (reports / name).mkdir(parents=True)  # DVC tracks the folder even if the baseline is left out
        if name == "ease" and prepared.num_items > ease_items:
            logger.warning("ease is left out: %d items are more than %d", prepared.num_items, ease_items)
            continue
        if name in scorers:
            facts = {"parameters": 0, "train_seconds": 0.0}
            valid = scorers[name](prepared)
            test = valid if fitted is prepared else scorers[name](fitted)
            shown: dict[str, Any] = {"filter_seen": filter_seen, "valid": valid, "count": fitted.count}
            metrics = results.report(test, prepared, reports / name, config, facts, **shown)
        else:
            metrics = counting.report(name, prepared, fitted, reports / name, config, filter_seen=filter_seen)
        values[f"{name}/test/ndcg@10"] = metrics["test/ndcg@10"]
    return values


def popularity_scorer(prepared: Sequences) -> Scorer:
    """Return a scorer that ranks by training events, the same for all users."""
    count = prepared.count.float()

    def scorer(_: Sequences, user: Tensor, __: Tensor) -> ScoreBlocks:
        def blocks() -> Iterator[tuple[int, Tensor]]:
            for first in range(1, len(count), ITEMS_PER_BLOCK):
                yield first, count[first : first + ITEMS_PER_BLOCK].repeat(len(user), 1)

        return blocks

    return scorer


def markov_scorer(prepared: Sequences) -> Scorer:
    """Return a scorer by decayed co-occurrence with the user's last items."""
    follows = _follow_counts(prepared)
    decay = 1 / torch.arange(VOTES, 0, -1)

    def scorer(source: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
        items = window(source, user, stop, VOTES).items
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
    """Return (V, V): decayed training counts of the column's item after the row's item, with scaled rows."""
    size = len(prepared.count)
    user, items = (x.numpy() for x in train_events(prepared))
    total = sparse.csr_array((size, size), dtype=np.float64)
    for step in range(1, REACH + 1):
        same = user[step:] == user[:-step]
        pair = (items[:-step][same], items[step:][same])
        weight = np.full(len(pair[0]), 1 / step)
        total = total + sparse.csr_array((weight, pair), shape=(size, size))
    tempered = 1 / np.sqrt(np.maximum(total.sum(axis=1), 1e-12))
    return sparse.csr_array(sparse.diags_array(tempered) @ total)


def ease_scorer(prepared: Sequences) -> Scorer:
    """Return the EASE scorer, which ignores the order of the past items (Steck, WWW 2019, arXiv:1905.03375)."""
    weights = _ease_weights(_user_items(prepared), RIDGE)

    def scorer(source: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
        row, item = seen(source, user, stop)
        scores = _binary(row, item, (len(user), len(source.count))) @ weights

        def blocks() -> Iterator[tuple[int, Tensor]]:
            yield 1, torch.from_numpy(scores[:, 1:])

        return blocks

    return scorer


def _user_items(prepared: Sequences) -> sparse.csr_array:
    """Return (users, V): 1 where the item is among the user's training events."""
    user, item = train_events(prepared)
    return _binary(user, item, (prepared.num_users, len(prepared.count)))


def _binary(row: Tensor, column: Tensor, shape: tuple[int, int]) -> sparse.csr_array:
    matrix = sparse.csr_array((np.ones(len(row), dtype=np.float32), (row.numpy(), column.numpy())), shape=shape)
    matrix.data[:] = 1  # the constructor has summed repeated entries
    return matrix


def _ease_weights(user_items: sparse.csr_array, ridge: float) -> NDArray[np.float32]:
    """Return (V, V): P = (X'X + ridge I)^-1, B_ij = -P_ij / P_jj, B_jj = 0 (equation 8)."""
    # in float64, since the eigenvalues of X'X are powers of ten apart
    gram = (user_items.T @ user_items).astype(np.float64).toarray()
    gram[np.diag_indices_from(gram)] += ridge
    inverse = linalg.inv(gram, overwrite_a=True, check_finite=False)
    inverse /= -np.diag(inverse)
    np.fill_diagonal(inverse, 0)
    weights: NDArray[np.float32] = inverse.astype(np.float32)
    return weights
