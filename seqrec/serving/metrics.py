"""What Prometheus reads of the service."""

from __future__ import annotations

import itertools
from collections import Counter as Counting
from collections.abc import Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from seqrec.serving.batcher import Served
from seqrec.serving.recommender import PAD, Answer, Request

DECILES = 10


class Metrics:
    """What Prometheus reads, in a registry of its own.

    Histories are compared with training by popularity: each decile of items, by train events, had a tenth of them.
    """

    def __init__(self, served: Served) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series a counter, of no use
        self.registry = own = CollectorRegistry()
        self.requests = Counter("seqrec_requests", "answers by source, a model or popularity", ["source"], registry=own)
        self._responses = Counter("seqrec_responses", "answers and refusals by HTTP status", ["status"], registry=own)
        self.latency = Histogram(
            "seqrec_latency_seconds",
            "from request to answer",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
            registry=own,
        )
        self.batch = Histogram(
            "seqrec_batch_size", "requests in a pass", buckets=(1, 2, 4, 8, 16, 32, 64), registry=own
        )
        self.length = Histogram(
            "seqrec_history_events", "events given", buckets=(0, 1, 2, 5, 10, 50, 200), registry=own
        )
        self.unknown = Counter("seqrec_unknown_events", "events that the model does not know", registry=own)
        popularity = Counter(
            "seqrec_history_popularity", "known events by decile, 0 the most popular", ["decile"], registry=own
        )
        self.deciles = [popularity.labels(str(number)) for number in range(DECILES)]
        self.decile_of: dict[str, int] = {}
        self.expected = Gauge("seqrec_training_events_per_user", "mean training events per user", registry=own)
        self.lost = Counter("seqrec_impressions_lost", "answers that could not be stored", registry=own)
        self.version = Gauge("seqrec_model", "1 for the version that is served", ["name", "version"], registry=own)
        behind = Gauge("seqrec_behind", "1 while the registry's champion cannot be served", registry=own)
        behind.set_function(lambda: float(bool(served.problem)))

    def switch(self, served: Served) -> None:
        """Take the figures of the model that is served now."""
        recommender, version = served.current
        self.version.clear()
        self.version.labels(recommender.name, version).set(1)
        self.expected.set(float(recommender.counts.sum()) / max(1, len(recommender.users)))
        order = np.argsort(-recommender.counts, kind="stable")
        counts = recommender.counts[order].astype(np.float64)  # float32 cannot count beyond 2^24
        share = (counts.cumsum() - counts) / max(1.0, counts.sum())
        decile = np.minimum((share * DECILES).astype(int), DECILES - 1)
        ranked = zip(order.tolist(), decile.tolist(), strict=True)
        self.decile_of = {recommender.item_ids[item - 1]: number for item, number in ranked if item != PAD}

    def count_response(self, status: int) -> None:
        """Account for an answer or a refusal by its HTTP status."""
        self._responses.labels(str(status)).inc()

    def count(self, requests: Sequence[Request], answers: Sequence[Answer]) -> None:
        """Account for the answers of one pass."""
        self.batch.observe(len(requests))
        for source, number in Counting(answer.source for answer in answers).items():
            self.requests.labels(source).inc(number)
        for request in requests:
            self.length.observe(len(request.history))
        self.unknown.inc(sum(answer.unknown for answer in answers))
        given = itertools.chain.from_iterable(request.history for request in requests)
        for decile, number in Counting(map(self.decile_of.get, given)).items():
            if decile is not None:
                self.deciles[decile].inc(number)
