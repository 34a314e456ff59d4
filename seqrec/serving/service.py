"""What the routes call: the served models, their queues and figures, the store."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError

from seqrec.serving import schemas
from seqrec.serving.batcher import Batcher, Served
from seqrec.serving.events import Past, Shown, Store, StoreError
from seqrec.serving.experiment import compare, in_candidate
from seqrec.serving.histories import Histories
from seqrec.serving.impressions import Impressions
from seqrec.serving.metrics import Metrics
from seqrec.serving.recommender import Answer, Recommender, Request
from seqrec.serving.schemas import Recommendation, State

logger = logging.getLogger(__name__)
NOBODY = Past()  # of whom nothing is known
HOUR = 3_600.0
Load = Callable[[], Recommender]


class Service:
    """What answers: the champion, perhaps a candidate for some of the users, their batches and figures."""

    def __init__(
        self,
        served: Served,
        largest: int,
        store: Store | None = None,
        candidate: Served | None = None,
        share: float = 0.0,
    ) -> None:
        self.served, self.store, self.candidate, self.share = served, store, candidate, share
        self.draining = False  # about to end: still answers, but wants no more requests
        self.metrics = Metrics(served)
        self.batcher = Batcher(served, largest, self.metrics.count)
        self.batchers = [self.batcher]
        if candidate is not None:
            self.batchers.append(Batcher(candidate, largest, self.metrics.count))
        self.impressions = Impressions(store, self.metrics.lost) if store else None
        self.histories = Histories(store) if store else None

    async def answer(self, queries: Sequence[schemas.Query]) -> list[Recommendation]:
        """Return the recommendations for `queries`; the store does not see answers to those that name a version.

        Raises:
            RequestValidationError: see `Recommender.check`; or a history is missing, and there is no store.
            HTTPException: 503, the model failed; 404, see `asked`.
        """
        began = time.perf_counter()
        try:
            requests = await self._requests(queries)
            batchers = [self.asked(query.by) if query.by else self._batcher(query.user) for query in queries]
            pairs = zip(batchers, requests, strict=True)
            answers = await asyncio.gather(*(batcher.answer(request) for batcher, request in pairs))
        except ValueError as error:
            reason = {"type": "value_error", "loc": ("body",), "msg": str(error)}
            raise RequestValidationError([reason]) from error
        except RuntimeError as error:
            raise HTTPException(503, "the model failed; the log of the service says why") from error
        seconds = time.perf_counter() - began
        for _ in answers:
            self.metrics.latency.observe(seconds)
        return [self._told(query, *answer) for query, answer in zip(queries, answers, strict=True)]

    def asked(self, by: schemas.By) -> Batcher:
        """Return the batches of the model that is asked for.

        Raises:
            HTTPException: 404, there is no candidate.
        """
        if by != "candidate":
            return self.batcher
        if self.candidate is None:
            raise HTTPException(404, "there is no candidate: start the service with --candidate")
        return self.batchers[1]

    def waiting(self) -> int:
        """Return how many requests wait for a model."""
        return sum(batcher.queue.qsize() for batcher in self.batchers)

    def _batcher(self, user: str | None) -> Batcher:
        """Return what answers a user: the candidate for its share of them, the champion for all others."""
        if self.candidate is None or not user or not in_candidate(user, self.candidate.current[1], self.share):
            return self.batcher
        return self.batchers[1]

    def _told(self, query: schemas.Query, answer: Answer, version: str) -> Recommendation:
        """Return an answer as it is sent, and have it written to the store if there is one."""
        name = uuid.uuid4().hex
        if self.impressions is not None and query.by is None:
            user = query.user if query.user and "\0" not in query.user else None
            self.impressions.add(
                Shown(recommendation_id=name, user=user, version=version, items=answer.items, at=time.time())
            )
        titles = answer.titles if query.titles else None
        return Recommendation(**{**vars(answer), "titles": titles}, version=version, recommendation_id=name)

    async def experiment(self) -> schemas.Experiment:
        """Return how the candidate does against the champion, by what the store knows.

        Raises:
            HTTPException: 404, there is no candidate or no store.
        """
        if self.candidate is None or self.store is None or self.impressions is None:
            raise HTTPException(404, "there is no experiment: start the service with --candidate and --store")
        await self.impressions.flush()
        versions = self.served.current[1], self.candidate.current[1]
        found = compare(await asyncio.to_thread(self.store.clicks, *versions), *versions)
        champion, candidate = (
            schemas.ClickThrough(version=r.version, users=r.users, answers=r.answers, rate=_known(r.rate))
            for r in (found.champion, found.candidate)
        )
        numbers = {name: _known(getattr(found, name)) for name in ("difference", "low", "high")}
        return schemas.Experiment(share=self.share, champion=champion, candidate=candidate, **numbers)

    async def _requests(self, queries: Sequence[schemas.Query]) -> list[Request]:
        """Return the requests; histories that are missing are looked up."""
        users = {query.user for query in queries if query.history is None and query.user is not None}
        if not users:
            return [query.request(NOBODY) for query in queries]
        if self.histories is None:
            raise ValueError("history: missing, and this service has no store of events: start it with --store")
        pasts = await self.histories.pasts(users)
        return [query.request(pasts.get(query.user or "", NOBODY)) for query in queries]

    async def expire(self, store: Store, days: float) -> None:
        """Delete what is too old, every hour; until cancelled."""
        while True:
            try:
                if number := await asyncio.to_thread(store.expire, days):
                    logger.info("%d events were deleted after %g days", number, days)
            except StoreError as error:  # the next time may go well
                logger.error("old events could not be deleted: %s", error)
            await asyncio.sleep(HOUR)

    async def follow(self, load: Load, version: Callable[[], str], poll_s: float) -> None:
        """Serve what `load` returns whenever `version` has changed; until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            try:
                newest = await asyncio.to_thread(version)
                if newest and newest != self.served.current[1]:
                    self.served.current = (await asyncio.to_thread(load), newest)
                    self.metrics.switch(self.served)
                    logger.info("serving version %s", newest)
                self.served.problem = ""
            except Exception as error:  # whatever a registry or a version in it may do; the next look may go well
                problem = f"{type(error).__name__}: {error}"[:500]
                if problem != self.served.problem:  # once, not at every look
                    logger.exception("no new champion can be loaded; version %s stays", self.served.current[1])
                self.served.problem = problem

    def state(self) -> State:
        """Return what is being served."""
        recommender, number = self.served.current
        return State(
            status="behind" if self.served.problem else "ok",
            problem=self.served.problem,
            model=recommender.name,
            version=number,
            candidate=self.candidate.current[1] if self.candidate else "",
            items=len(recommender.item_ids),
            users=len(recommender.users),
        )


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number
