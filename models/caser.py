"""Caser: convolutional sequence embedding recommendation (Tang and Wang, WSDM 2018, arXiv:1809.07426).

Differs from the paper in these places:
- each event has one target, the next event (T = 1), rather than the next T events;
- the loss is that of the training settings, by default full softmax, not binary cross-entropy with three negatives;
- input item vectors are scaled by sqrt(d), so that the small initial values do not vanish in the convolutions;
- unknown users have the zero vector, so that scores depend only on the window.

Shape suffixes, besides those of base.py: C features of the convolutions, T = L + window - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, Options, SequenceModel, require
from seqrec.models.layers import Dropout, initialise


@dataclass(frozen=True, kw_only=True)
class CaserOptions(Options):
    """Options of Caser."""

    d_model: int = 64
    window: int = 5  # L in the paper: number of recent items that a query reads
    horizontal: int = 16  # number of horizontal filters of each height from 1 to `window`
    vertical: int = 4  # number of vertical filters
    dropout: float = 0.5  # dropout of the filters' outputs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "window", "horizontal", "vertical")
        require(self.window <= self.length, f"window: a query reads {self.window} items, but length is {self.length}")


class Caser(SequenceModel):
    """Convolutions over the last items as an image of window x width, joined with a user vector."""

    Options = CaserOptions
    options: CaserOptions
    objectives = frozenset({"causal", "last"})
    always_reads = frozenset({"user"})
    biased = True

    def __init__(self, options: CaserOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        d_model, window = options.d_model, options.window
        self.items = nn.Embedding(catalogue.num_items + 1, d_model, padding_idx=PAD)
        self.users = nn.Embedding(catalogue.num_users + 1, d_model, padding_idx=0)
        self.horizontal = nn.ModuleList(nn.Conv1d(d_model, options.horizontal, h) for h in range(1, window + 1))
        self.vertical = nn.Linear(window, options.vertical, bias=False)
        self.dropout = Dropout(options.dropout)
        self.dense = nn.Linear(options.horizontal * window + options.vertical * d_model, d_model)
        self.output = nn.Embedding(catalogue.num_items + 1, 2 * d_model, padding_idx=PAD)  # W' of equation 10
        self.bias = nn.Parameter(torch.zeros(catalogue.num_items + 1))
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        window = self.options.window
        items_BL = batch.items[:, -window:] if last else batch.items
        x_BLD = self.items(items_BL) * self.options.d_model**0.5
        missing = window - x_BLD.shape[1] if last else window - 1
        feature_BLC = self._convolve(F.pad(x_BLD.mT, (missing, 0)))
        z_BLD = torch.relu(self.dense(self.dropout(feature_BLC)))  # (9)
        user_BLD = self.users(batch.user).unsqueeze(1).expand_as(z_BLD)
        return torch.cat([z_BLD, user_BLD, torch.ones_like(z_BLD[..., :1])], -1)  # (10)

    def _convolve(self, x_BDT: Tensor) -> Tensor:
        """Return the filters' outputs (B, T - window + 1, C) for all windows along the time axis."""
        window = self.options.window
        pooled = [
            F.max_pool1d(torch.relu(filters(x_BDT)), window - height + 1, stride=1)  # (4) to (6)
            for height, filters in enumerate(self.horizontal, start=1)
        ]
        vertical_BDLC = self.vertical(x_BDT.unfold(2, window, 1))  # (7)
        return torch.cat([*(x.mT for x in pooled), vertical_BDLC.transpose(1, 2).flatten(2)], -1)  # (8)

    def item_vectors(self) -> Tensor:
        return torch.cat([self.output.weight, self.bias.unsqueeze(1)], 1)
