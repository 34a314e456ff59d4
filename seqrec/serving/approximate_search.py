"""Approximate search of the best items, for catalogues that take long to score whole: `seqrec serve --ann 128`.

A graph of the items (HNSW, Malkov and Yashunin 2020; by usearch) leads to candidates, whose scores are then exact. Item
vectors get one more coordinate, which makes them equally long: the largest inner product is then the nearest neighbour
(Bachrach et al., RecSys 2014).

Shape suffixes, besides those of models/base.py: C candidates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from usearch.index import Index

from seqrec.config import RegisterConfig
from seqrec.models.base import PAD, Batch
from seqrec.serving.recommender import Best, Recommender, Request

logger = logging.getLogger(__name__)
FOLLOWERS = 64  # of each of the newest events that are candidates for their counts
DRAWN, EVENTS, TOP = 200, 10, 10  # histories, events of each and items wanted of each, for the recall


class ApproximateRecommender(Recommender):
    """A recommender that searches a graph of items instead of scoring all of them."""

    index: Index
    expansion: int

    @classmethod
    def of(cls, place: str | Path, expansion: int, config: RegisterConfig | None = None) -> ApproximateRecommender:
        """Load what `Recommender.load` does, build the graph, and log its recall.

        Args:
            place: see `Recommender.load`.
            expansion: candidates that a search keeps; more find more, and take longer.
            config: see `Recommender.load`.
        """
        self = cls.load(place, config)
        assert isinstance(self, cls)
        self.build(expansion)
        logger.info("ann: recall@%d against exact search, expansion %d: %.4f", TOP, expansion, self.recall())
        return self

    def build(self, expansion: int) -> None:
        """Build the graph.

        Raises:
            ValueError: `expansion` is less than 1.
        """
        if expansion < 1:
            raise ValueError(f"ann: {expansion} candidates are too few, 64 to 512 are usual")
        self.expansion = expansion
        item_VD = self.item_vectors[1:]
        square_V = item_VD.square().sum(1)
        rest_V = (square_V.max() - square_V).sqrt()
        self.index = Index(ndim=item_VD.shape[1] + 1, metric="ip", dtype="f32", expansion_search=expansion)
        points = torch.cat([item_VD, rest_V.unsqueeze(1)], 1).numpy()
        self.index.add(np.arange(1, len(self.item_vectors)), points, threads=torch.get_num_threads())

    @torch.no_grad()
    def recall(self, seed: int = 0) -> float:
        """Return the share of the ten best items that is found, of 200 histories of ten events drawn by popularity."""
        generator = torch.Generator().manual_seed(seed)
        weight_V = self.counts[1:] + 1
        drawn = torch.multinomial(weight_V, DRAWN * EVENTS, replacement=True, generator=generator)
        ids = [self.item_ids[place] for place in drawn.tolist()]
        requests = [Request(history=ids[first : first + EVENTS], k=TOP) for first in range(0, len(ids), EVENTS)]
        batch = self._batch(requests, [range(EVENTS)] * DRAWN)
        nothing = [torch.zeros(0, dtype=torch.int64)] * len(requests)
        k = min(TOP, len(self.item_ids))
        wanted = [k] * DRAWN
        pairs = zip(self._top(batch, nothing, wanted), super()._top(batch, nothing, wanted), strict=True)
        return sum(len({*found} & {*exact}) for (_, found), (_, exact) in pairs) / (k * DRAWN)

    def _top(self, batch: Batch, hidden: Sequence[Tensor], wanted: Sequence[int]) -> list[Best]:
        """Search as many candidates for a row as its own request needs: no answer depends on another request."""
        numbers = [self._candidates(k + len(items)) for k, items in zip(wanted, hidden, strict=True)]
        grown = len(self.item_vectors) > 1 + len(self.index)  # by items of a request
        best: dict[int, Best] = {}
        for number in set(numbers):
            rows = [row for row, own in enumerate(numbers) if own == number]
            part = Batch(*(values[rows] for values in batch))
            few = [hidden[row] for row in rows], [wanted[row] for row in rows]
            exact = grown or 2 * number > len(self.index)
            best |= zip(rows, super()._top(part, *few) if exact else self._found(part, *few, number), strict=True)
        return [best[row] for row in range(len(numbers))]

    def _candidates(self, number: int) -> int:
        """Return `number`, rounded up to what a search keeps at least, or to 2, 4, 8, ... times that."""
        return self.expansion << max(0, math.ceil(math.log2(number / self.expansion)))

    def _found(self, batch: Batch, hidden: Sequence[Tensor], wanted: Sequence[int], number: int) -> list[Best]:
        """Return the best of `number` candidates of each row."""
        query_BD = self.model(batch, last=True)[:, 0].float()
        item_BC, none_BC = self._search(query_BD, number)
        if self.term is not None:
            item_BC, none_BC = self._with_followers(item_BC.masked_fill(none_BC, PAD), self._events(batch))
        score_BC = (self.item_vectors[item_BC] @ query_BD.unsqueeze(2)).squeeze(2)
        if self.term is not None:
            score_BC += self.term.of(self._events(batch), item_BC)
        row_B1, size = torch.arange(len(hidden)).unsqueeze(1), len(self.item_vectors)
        hidden_N = torch.cat([row * size + items for row, items in enumerate(hidden)])
        score_BC.masked_fill_(none_BC | torch.isin(row_B1 * size + item_BC, hidden_N), float("-inf"))
        value_BK, place_BK = score_BC.topk(min(max(wanted), score_BC.shape[1]))
        return list(zip(value_BK.tolist(), item_BC.gather(1, place_BK).tolist(), strict=True))

    def _with_followers(self, item_BC: Tensor, items_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates and what followed the newest events most often, and which of them are none."""
        assert self.term is not None
        items_BJ, _ = self.term.newest(items_BL)
        targets, _ = self.term.padded(items_BJ.flatten(), FOLLOWERS)
        item_BC = torch.cat([item_BC, targets.view(len(item_BC), -1)], 1).sort(dim=1).values
        again_BC = F.pad(item_BC[:, 1:] == item_BC[:, :-1], (1, 0))
        return item_BC, again_BC | (item_BC == PAD)

    def _search(self, query_BD: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return candidates (B, C), and which of them are none because the search found fewer."""
        found = self.index.search(F.pad(query_BD, (0, 1)).numpy(), number, threads=torch.get_num_threads())
        item_BC = torch.from_numpy(np.atleast_2d(found.keys).astype(np.int64))
        counts = getattr(found, "counts", [item_BC.shape[1]])  # of one query there are none
        none_BC = torch.arange(item_BC.shape[1]) >= torch.from_numpy(np.asarray(counts, np.int64)).unsqueeze(1)
        return item_BC.masked_fill(none_BC, 0), none_BC
