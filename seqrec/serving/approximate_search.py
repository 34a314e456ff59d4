"""Approximate search of the best items, for catalogues that take long to score whole: `seqrec serve --ann 128`.

A graph of the items (HNSW, Malkov and Yashunin 2020; by usearch) leads to candidates, whose scores are then exact. Item
vectors get two more coordinates: what the count term adds for every history, and one that makes them equally long, so
that the largest inner product is the nearest neighbour (Bachrach et al., RecSys 2014).

Shape suffixes, besides those of models/base.py: C candidates; N hidden items.
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

from seqrec.counts.term import CountTerm
from seqrec.models.base import PAD, SequenceModel
from seqrec.serving.recommender import Best, Histories, Recommender, Request, best_of
from seqrec.serving.rules import NONE, Items
from seqrec.serving.torch_engine import TorchEngine, as_batch
from seqrec.training.checkpoint import load_checkpoint

logger = logging.getLogger(__name__)
FOLLOWERS = 64  # of each of the newest events that are candidates for their counts
DRAWN, EVENTS, TOP = 200, 10, 10  # histories, events of each and items wanted of each, for the recall


class ApproximateEngine(TorchEngine):
    """An engine that searches a graph of items instead of scoring all of them."""

    def __init__(self, model: SequenceModel, term: CountTerm | None, expansion: int) -> None:
        """Build the graph. A search keeps `expansion` candidates; more of them raise recall and latency."""
        super().__init__(model, term)
        self.expansion = expansion
        self.terms = () if term is None else (term, *term.further.values())
        prior_V = sum((one.popularity * one.log_popularity for one in self.terms), torch.zeros(len(self.item_vectors)))
        item_VD = torch.cat([self.item_vectors, prior_V.unsqueeze(1)], 1)[1:]  # beside a 1 in each query
        square_V = item_VD.square().sum(1)
        rest_V = (square_V.max() - square_V).sqrt()
        self.index = Index(ndim=item_VD.shape[1] + 1, metric="ip", dtype="f32", expansion_search=expansion)
        points = torch.cat([item_VD, rest_V.unsqueeze(1)], 1).numpy()
        self.index.add(np.arange(1, len(self.item_vectors)), points, threads=torch.get_num_threads())

    @torch.no_grad()
    def best(self, past: Histories, hidden: Sequence[Items], wanted: Sequence[int]) -> list[Best]:
        """Search as many candidates for a row as its own request needs: no answer depends on another request."""
        best, batch = [], as_batch(past)
        for query_D, items_L, own, k in zip(self.queries(batch), batch.items, hidden, wanted, strict=True):
            doublings = max(0, math.ceil(math.log2((k + len(own)) / self.expansion)))
            number = self.expansion << doublings  # of candidates; a search keeps `expansion` at least
            if 2 * number > len(self.index):
                best.append(best_of(self.of_queries(query_D[None], items_L[None])[0].numpy(), own, k))
            else:
                best.append(self._found(query_D, items_L, torch.from_numpy(own), k, number))
        return best

    def _found(self, query_D: Tensor, items_L: Tensor, hidden_N: Tensor, k: int, number: int) -> Best:
        """Return the best of `number` candidates, and of what followed the newest events most often."""
        item_C = self._search(query_D, number)
        for term in self.terms:
            events_BJ, _ = term.newest(items_L[None])
            follower_JK, _ = term.padded(events_BJ[0], FOLLOWERS)
            item_C = torch.cat([item_C, follower_JK.flatten()]).unique()
        score_C = self.item_vectors[item_C] @ query_D
        if self.term is not None:
            score_C += self.term.of(items_L[None], item_C[None])[0]
        score_C[torch.isin(item_C, hidden_N) | (item_C == PAD)] = float("-inf")
        values, places = score_C.topk(min(k, len(item_C)))
        return values.tolist(), item_C[places].tolist()

    def _search(self, query_D: Tensor, number: int) -> Tensor:
        """Return up to `number` candidates (C,)."""
        found = self.index.search(F.pad(F.pad(query_D, (0, 1), value=1.0), (0, 1)).numpy(), number)
        return torch.from_numpy(found.keys.astype(np.int64))


def load(folder: Path, expansion: int) -> Recommender:
    """Return the recommender that searches the items of the model in `folder`; log its recall."""
    checkpoint = load_checkpoint(folder)
    engine = ApproximateEngine(checkpoint.model, checkpoint.count_term, expansion)
    recommender = Recommender.of(checkpoint, engine)
    logger.info("ann: with %d candidates, recall@%d against exact search is %.4f", expansion, TOP, recall(recommender))
    return recommender


def recall(recommender: Recommender) -> float:
    """Return the share of the ten best items that is found, of 200 histories of ten events drawn by popularity."""
    engine = recommender.engine
    assert isinstance(engine, ApproximateEngine)
    generator = torch.Generator().manual_seed(0)
    weight_V = torch.from_numpy(recommender.counts[1:] + 1)
    drawn = torch.multinomial(weight_V, DRAWN * EVENTS, replacement=True, generator=generator)
    ids = [recommender.item_ids[place] for place in drawn.tolist()]
    requests = [Request(history=ids[first : first + EVENTS], k=TOP) for first in range(0, len(ids), EVENTS)]
    k = min(TOP, len(recommender.item_ids))
    past = recommender.histories(requests, [recommender.known(request) for request in requests])
    asked = (past, [NONE] * DRAWN, [k] * DRAWN)
    pairs = zip(engine.best(*asked), TorchEngine.best(engine, *asked), strict=True)
    return sum(len({*found} & {*exact}) for (_, found), (_, exact) in pairs) / (k * DRAWN)
