"""EASE as a table of votes: what each item of a history adds to the score of every other (Steck, WWW 2019).

EASE is the best linear map from a user's items to these items, where no item explains itself (arXiv:1905.03375). Its
authors add up the rows of all items of a history; here older events may have a smaller weight.

Shape suffixes: V items, padding (0) included   K kept per item
"""

from __future__ import annotations

import hashlib
import warnings

import torch
from torch import Tensor

from seqrec.counts.table import CountTable
from seqrec.data.sequences import Sequences, train_events

RIDGE = 100.0  # L2: best on validation of ML-100K; on ML-1M, 250 is best, by 2 %
_LAST: dict[bytes, CountTable] = {}  # table of the last dataset: every model of a run needs it, and it takes minutes
ROWS = 256  # of X'X at a time
TARGETS = 256  # weights kept per item; keeping all gained nothing on validation of Scientific and ML-100K


def ease_weights(user_item: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return B (V, V) of EASE: P = (X'X + ridge I)^-1, B_ij = -P_ij / P_jj, B_jj = 0 (equation 8)."""
    gram_VV = _gram(user_item)
    gram_VV.diagonal().add_(ridge)
    factor_VV = torch.linalg.cholesky(gram_VV)
    del gram_VV
    inverse_VV = torch.cholesky_inverse(factor_VV)
    del factor_VV
    inverse_VV /= -inverse_VV.diagonal().clone()
    inverse_VV.fill_diagonal_(0)
    return inverse_VV.float()


def _gram(user_item: Tensor) -> Tensor:
    """Return X'X (V, V), some rows at a time: as a sparse matrix, it may take as much memory as three dense ones."""
    item_user = user_item.t().coalesce()
    (item_N, user_N), value_N = item_user.indices(), item_user.values()
    gram_VV = torch.empty(len(item_user), len(item_user), dtype=value_N.dtype)
    for first in range(0, len(gram_VV), ROWS):
        rows_RV = gram_VV[first : first + ROWS]
        begin, end = torch.searchsorted(item_N, torch.tensor([first, first + len(rows_RV)])).tolist()
        indices = torch.stack([item_N[begin:end] - first, user_N[begin:end]])
        size = (len(rows_RV), item_user.shape[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that its sparse matrices are in beta, and are not checked
            part = torch.sparse_coo_tensor(indices, value_N[begin:end], size, is_coalesced=True)
            rows_RV.copy_(torch.sparse.mm(part, user_item).to_dense())
    return gram_VV


def ease_table(data: Sequences) -> CountTable:
    """Return EASE's weights as a count table: for each item, those with the largest absolute values in its row of B."""
    user_item = _user_items(data)
    key = hashlib.sha256(user_item.indices().numpy().tobytes()).digest() + bytes(str(user_item.shape), "ascii")
    if key not in _LAST:
        _LAST.clear()
        _LAST[key] = _table(ease_weights(user_item))
    return _LAST[key]


def _table(weight_VV: Tensor) -> CountTable:
    weight_VV[:, 0] = 0  # padding
    kept_VK = weight_VV.abs().topk(min(TARGETS, len(weight_VV) - 1)).indices
    values_VK = weight_VV.gather(1, kept_VK)
    voting_VK = values_VK != 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), voting_VK.sum(1).cumsum(0)])
    return CountTable(offsets, kept_VK[voting_VK].int(), values_VK[voting_VK])


def _user_items(data: Sequences) -> Tensor:
    """Return X (users, V), sparse: 1 where the item is among the user's training events.

    In float64, since the eigenvalues of X'X are powers of ten apart.
    """
    user, item = train_events(data)
    size = len(data.count)
    key = torch.unique(user * size + item)
    shape = (data.num_users, size)
    place = torch.stack([key // size, key % size])
    ones = torch.ones(len(key), dtype=torch.float64)
    return torch.sparse_coo_tensor(place, ones, shape, check_invariants=True, is_coalesced=True)
