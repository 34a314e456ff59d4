"""Vectors of items from counts: before any training, items that follow the same items have similar vectors.

The matrix of positive pointwise mutual information, made symmetric, is factorised: its largest eigenvectors, scaled by
the root of their eigenvalues, are near to what word2vec learns (Levy and Goldberg, NIPS 2014).

Shape suffixes: V items, padding (0) included   N pairs   D width   Q width with the oversampling
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from seqrec.counts.table import count
from seqrec.counts.term import kernel
from seqrec.data.sequences import Sequences
from seqrec.models.base import SequenceModel

WINDOW = 10  # maximum distance of two counted events
TARGETS = 64  # counts kept per item, the largest ones
LENGTHENED = 3.0  # a short row would turn away from its direction within the first steps
OVERSAMPLING, PASSES = 16, 4  # of the subspace iteration (Halko, Martinsson and Tropp, SIAM Review 2011)


@torch.no_grad()
def initialise(model: SequenceModel, data: Sequences, seed: int) -> None:
    """Turn each row of a table named `items` to the direction of the item's vector, `LENGTHENED` times as long.

    The directions are rotated at random, so that no column of the table is larger than another and the members of an
    ensemble differ. Rows of items without counts are not changed.
    """
    tables = [table for name, table in model.named_parameters() if f".{name}".endswith(".items.weight")]
    if not tables:
        return
    width, generator = tables[0].shape[1], torch.Generator().manual_seed(seed)
    direction_VD = F.normalize(vectors(data, width), dim=1)
    known_V = direction_VD.any(1)
    for table in tables:
        rotation_DD, _ = torch.linalg.qr(torch.randn(width, width, generator=generator))
        table_VD = table[: len(known_V)]  # without MASK
        norm_V1 = LENGTHENED * table_VD[known_V].norm(dim=1, keepdim=True)
        table_VD[known_V] = direction_VD[known_V] @ rotation_DD * norm_V1


def vectors(data: Sequences, width: int) -> Tensor:
    """Return vectors (V, D) of the items from training events, with only zeros for items without counts.

    If there are fewer than D = `width` eigenvectors, the last columns are 0.
    """
    table = count(data, kernel("inverse", WINDOW).tolist(), TARGETS)
    size = len(table.offsets) - 1
    row_N, target_N = torch.repeat_interleave(torch.arange(size), table.offsets.diff()), table.targets.long()
    before_V, after_V = (
        table.values.new_zeros(size).index_add_(0, items_N, table.values) for items_N in (row_N, target_N)
    )
    expected_N = before_V[row_N] * after_V[target_N] / table.values.sum()
    information_N = (table.values / expected_N).log().clamp(min=0)
    place_2N = torch.stack([torch.cat([row_N, target_N]), torch.cat([target_N, row_N])])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sparse tensors
        pairs = torch.sparse_coo_tensor(place_2N, information_N.repeat(2), (size, size))
        matrix_VV = pairs.coalesce().to_sparse_csr()
    generator = torch.Generator().manual_seed(0)
    basis_VQ = torch.randn(size, min(size, width + OVERSAMPLING), generator=generator)
    for _ in range(PASSES):
        basis_VQ, _ = torch.linalg.qr(matrix_VV @ basis_VQ)
    value_Q, vector_QQ = torch.linalg.eigh(basis_VQ.T @ (matrix_VV @ basis_VQ))
    largest = slice(-width, None)  # eigh sorts them upwards
    vector_VD = (basis_VQ @ vector_QQ[:, largest]) * value_Q[largest].clamp(min=0).sqrt()
    vector_VD[matrix_VV @ torch.ones(size) == 0] = 0.0  # where rounding left 1e-10
    return F.pad(vector_VD, (0, width - vector_VD.shape[1]))
