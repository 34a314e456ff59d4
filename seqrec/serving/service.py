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
from seqrec.serving.config import ServeConfig
from seqrec.serving.events import Clicks, Past, Shown, Store, StoreError
from seqrec.serving.experiment import compare, in_candidate
from seqrec.serving.guards import Rates, after
from seqrec.serving.histories import Histories
from seqrec.serving.impressions import Impressions
from seqrec.serving.kept import Kept
from seqrec.serving.metrics import Metrics
from seqrec.serving.recommender import Answer, Recommender, Request
from seqrec.serving.schemas import Recommendation, State

logger = logging.getLogger(__name__)
NOBODY = Past()  # of whom nothing is known
HOUR = 3_600.0
LOOKED_UP = 32  # users that are looked up at once: others wait for no more
TREND_S, CLICKS_S = 60.0, 5.0  # for which a trend, and the state of an experiment, are kept
Load = Callable[[], Recommender]


class Service:
    """What answers: the champion, perhaps a candidate for some of the users, their batches and figures."""

    def __init__(
        self,
        served: Served,
        options: ServeConfig,
        store: Store | None = None,
        candidate: Served | None = None,
    ) -> None:
        self.served, self.options, self.store, self.candidate = served, options, store, candidate
        self.share = options.share  # of the users, whom the candidate answers
        self.rates = Rates(options.rate) if options.rate else None
        self.draining = False  # about to end: still answers, but wants no more requests
        self.metrics = Metrics(served)
        self.batcher = Batcher(served, options.batch, self.metrics.count)
        self.batchers = [self.batcher]
        if candidate is not None:
            self.batchers.append(Batcher(candidate, options.batch, self.metrics.count))
        self.impressions = Impressions(store, self.metrics.lost) if store else None
        self.histories = Histories(store, self._longest) if store else None
        self.trends, self.clicks = (
            Kept[float, list[tuple[str, float]]](TREND_S),
            Kept[tuple[str, str], list[Clicks]](CLICKS_S),
        )

    async def answer(self, queries: Sequence[schemas.Query], caller: str) -> list[Recommendation]:
        """Return the recommendations for `queries`; the store does not see answers to those that name a version.

        Raises:
            RequestValidationError: see `Recommender.check`; or a history is missing, and there is no store.
            HTTPException: 503, the model failed; 404, see `asked`; 413 and 429, see `_check_cost` and `_charge`.
        """
        began = time.perf_counter()
        try:
            requests = await self._requests(queries, caller)
            batchers = [self.asked(query.by) if query.by else self._batcher(query.user) for query in queries]
            answers = await asyncio.gather(*self._handed(batchers, requests))
        except ValueError as error:
            reason = {"type": "value_error", "loc": ("body",), "msg": str(error)}
            raise RequestValidationError([reason]) from error
        except RuntimeError as error:
            raise HTTPException(503, "the model failed; the log of the service says why") from error
        seconds = time.perf_counter() - began
        for _ in answers:
            self.metrics.latency.observe(seconds)
        return [self._told(query, *answer) for query, answer in zip(queries, answers, strict=True)]

    @staticmethod
    def _handed(batchers: Sequence[Batcher], requests: Sequence[Request]) -> list[asyncio.Future[tuple[Answer, str]]]:
        """Hand each request to its batcher, those of one batcher together; return the answers in their order."""
        answers: dict[int, asyncio.Future[tuple[Answer, str]]] = {}
        for batcher in set(batchers):
            places = [place for place, own in enumerate(batchers) if own is batcher]
            answers |= zip(places, batcher.answer([requests[place] for place in places]), strict=True)
        return [answers[place] for place in range(len(requests))]

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

    def _longest(self) -> int:
        """Return how many events of a user the models read."""
        return max(int(batcher.served.current[0].model.options.history) for batcher in self.batchers)

    async def trending(self, days: float) -> list[tuple[str, float]]:
        """Return the items that gained most, see `Store.trending`.

        Raises:
            HTTPException: 503, another window is being counted.
        """
        store = self.store
        assert store is not None
        return await self.trends.get(days, lambda: store.trending(days, schemas.ITEMS, time.time()))

    def waiting(self) -> int:
        """Return how many requests wait for a model."""
        return sum(len(batcher.waiting) for batcher in self.batchers)

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
        store = self.store
        found = compare(await self.clicks.get(versions, lambda: store.clicks(*versions)), *versions)
        champion, candidate = (
            schemas.ClickThrough(version=r.version, users=r.users, answers=r.answers, rate=_known(r.rate))
            for r in (found.champion, found.candidate)
        )
        numbers = {name: _known(getattr(found, name)) for name in ("difference", "low", "high")}
        return schemas.Experiment(share=self.share, champion=champion, candidate=candidate, **numbers)

    async def _requests(self, queries: Sequence[schemas.Query], caller: str) -> list[Request]:
        """Return the requests; histories that are missing are looked up, some users at a time."""
        requests = [query.request(NOBODY) for query in queries]
        missing = [place for place, query in enumerate(queries) if query.history is None]
        self._check_cost(requests)
        for first in range(0, len(missing), LOOKED_UP):
            if self.histories is None:
                raise ValueError("history: missing, and this service has no store of events: start it with --store")
            users = {place: queries[place].user or "" for place in missing[first : first + LOOKED_UP]}
            pasts = await self.histories.pasts(set(users.values()))
            for place, user in users.items():
                requests[place] = queries[place].request(pasts[user])
            self._check_cost(requests)
        self._charge(caller, sum(request.cost for request in requests))
        return requests

    def _check_cost(self, requests: Sequence[Request]) -> None:
        """Refuse requests that cost too much together: 413."""
        cost, most = sum(request.cost for request in requests), self.options.max_cost
        if cost > most:
            reason = f"this request costs {cost:.4g}, and the service allows {most:g} (max_cost)"
            raise HTTPException(413, f"{reason}: ask for fewer or shorter lists at once, or with fewer rules")

    def _charge(self, caller: str, cost: float) -> None:
        """Count the cost of a request; refuse it where the caller has to make up for earlier ones: 429."""
        if self.rates is not None and (seconds := self.rates.charge(caller, cost)):
            raise HTTPException(
                429, f"more than {self.options.rate:g} requests a second, by their cost", after(seconds)
            )

    async def explain(self, question: schemas.Question, caller: str) -> list[float]:
        """Return what each event of a history adds to the score of an item.

        Raises:
            HTTPException: 404, the item is unknown, or see `asked`; 429, see `_charge`.
        """
        request, batcher = Request(history=question.history, user=question.user), self.asked(question.by)
        self._charge(caller, request.cost * min(len(request.history), 200) / 2)
        try:
            return await batcher.apart(lambda r: r.explain(request, question.item), batcher.served.current[0])
        except ValueError as error:
            raise HTTPException(404, str(error)) from error

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
