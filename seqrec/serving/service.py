"""What the routes call: the served models, their queues and figures, the store."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError

from seqrec.config import ServeConfig
from seqrec.serving import schemas
from seqrec.serving.async_store import AsyncStore, Kept
from seqrec.serving.batcher import NO_CHAMPION, Batcher, Served
from seqrec.serving.events import Clicks, Shown, Store, UserHistory
from seqrec.serving.experiment import compare, in_candidate
from seqrec.serving.metrics import Metrics
from seqrec.serving.rates import Rates, retry_after
from seqrec.serving.recommender import Answer, Recommender, Request

logger = logging.getLogger(__name__)
UNKNOWN = UserHistory()
LARGEST = 64  # lists per pass of the model
LOOKED_UP = 32  # users that are looked up at once: others wait for no more
TREND_S, CLICKS_S = 60.0, 5.0  # for which a trend, and the state of an experiment, are kept
Load = Callable[[], Recommender]


def cost_of_explanation(request: Request, events: int) -> float:
    """Return the cost of a pass without each event of a history, of which a model reads the last `events`."""
    read = min(len(request.history), events)
    return request.cost * read / 2 * max(1.0, read / 200) ** 2


class Service:
    """What answers: the champion, perhaps a candidate for some of the users, their batches and figures."""

    def __init__(self, options: ServeConfig, store: Store | None, candidate: Served | None) -> None:
        self.served, self.options, self.candidate = Served(), options, candidate
        self.share = options.share  # of the users, whom the candidate answers
        self.rates = Rates(options.rate) if options.rate else None
        self.draining = False  # about to end: still answers, but wants no more requests
        self.metrics = Metrics(self.served)
        models = [self.served] if candidate is None else [self.served, candidate]
        self.batchers = [Batcher(served, LARGEST, self.metrics.count) for served in models]
        self.store = AsyncStore(store, self.metrics.lost) if store else None
        self.trends = Kept[float, list[tuple[str, float]]](TREND_S)
        self.clicks = Kept[tuple[str, str], list[Clicks]](CLICKS_S)

    @property
    def ready(self) -> bool:
        """Whether requests can be answered, and the service is not about to end."""
        return self.served.ready and not self.draining

    def switch(self, recommender: Recommender, version: str) -> None:
        """Serve another champion from the next pass on."""
        first = not self.served.ready
        self.served.switch(recommender, version)
        self.metrics.switch(self.served)
        if first:
            gc.freeze()  # looking through all objects of the libraries for garbage takes up to a tenth of a second

    async def answer(self, queries: Sequence[schemas.Query], caller: str) -> list[schemas.Recommendation]:
        """Return the recommendations for `queries`; the store does not see answers to those that name a version.

        Raises:
            RequestValidationError: see `Recommender.check`; or a history is missing, and there is no store.
            RuntimeError: the model failed.
            HTTPException: 404, there is no candidate; 413 and 429, it costs too much.
        """
        began = time.perf_counter()
        try:
            requests = await self._requests(queries, caller)
            batchers = [self.batcher_of(query.by, query.user) for query in queries]
            answers: dict[int, asyncio.Future[tuple[Answer, str]]] = {}
            for batcher in self.batchers:
                places = [place for place, own in enumerate(batchers) if own is batcher]
                answers |= zip(places, batcher.answer([requests[place] for place in places]), strict=True)
            found = await asyncio.gather(*(answers[place] for place in range(len(requests))))
        except ValueError as error:
            reason = {"type": "value_error", "loc": ("body",), "msg": str(error)}
            raise RequestValidationError([reason]) from error
        seconds = time.perf_counter() - began
        for _ in found:
            self.metrics.latency.observe(seconds)
        return [self._recommendation(query, *answer) for query, answer in zip(queries, found, strict=True)]

    def batcher_of(self, by: schemas.By | None, user: str | None = None) -> Batcher:
        """Return what answers: the model that is asked for, or the candidate for its share of the users.

        Raises:
            HTTPException: 404, there is no candidate.
        """
        if by == "candidate" and self.candidate is None:
            raise HTTPException(404, "there is no candidate: start the service with --candidate")
        if by is None and user and self.candidate and in_candidate(user, self.candidate.current[1], self.share):
            by = "candidate"
        return self.batchers[-1] if by == "candidate" else self.batchers[0]

    def waiting(self) -> int:
        """Return how many requests wait for a model."""
        return sum(len(batcher.waiting) + batcher.apart_waiting for batcher in self.batchers)

    def _recommendation(self, query: schemas.Query, answer: Answer, version: str) -> schemas.Recommendation:
        """Return an answer as it is sent, and have it written to the store if there is one."""
        name = uuid.uuid4().hex
        if self.store is not None and query.by is None:
            user = query.user if query.user and "\0" not in query.user else None
            shown = Shown(recommendation_id=name, user=user, version=version, items=answer.items, at=time.time())
            self.store.show(shown)
        titles = answer.titles if query.titles else None
        return schemas.Recommendation(**vars(answer) | {"titles": titles}, version=version, recommendation_id=name)

    async def experiment(self) -> schemas.Experiment:
        """Return how the candidate does against the champion, by what the store knows.

        Raises:
            HTTPException: 404, there is no candidate, or it has become the champion, or there is no store.
        """
        if self.candidate is None or self.store is None:
            raise HTTPException(404, "there is no experiment: start the service with --candidate and --store")
        await self.store.flush()
        versions, store = (self.served.current[1], self.candidate.current[1]), self.store.store
        if versions[0] == versions[1]:
            reason = "the experiment is over: the candidate is the champion. Start the service with another --candidate"
            raise HTTPException(404, reason)
        clicks = await self.clicks.get(versions, lambda: store.clicks(*versions))
        return schemas.Experiment(share=self.share, **asdict(compare(clicks, *versions)))

    async def _requests(self, queries: Sequence[schemas.Query], caller: str) -> list[Request]:
        """Return the requests; histories that are missing are looked up, some users at a time."""
        requests = [query.request(UNKNOWN) for query in queries]
        missing = [place for place, query in enumerate(queries) if query.history is None]
        self._check_cost(sum(request.cost for request in requests))
        for first in range(0, len(missing), LOOKED_UP):
            if self.store is None:
                raise ValueError(
                    "history is missing, and the service has no event store to look it up: start it with --store"
                )
            users = {place: queries[place].user or "" for place in missing[first : first + LOOKED_UP]}
            longest = max(batcher.served.current[0].events for batcher in self.batchers)
            histories = await self.store.histories(set(users.values()), longest)
            for place, user in users.items():
                requests[place] = queries[place].request(histories[user])
            self._check_cost(sum(request.cost for request in requests))
        self._charge(caller, sum(request.cost for request in requests))
        return requests

    def _check_cost(self, cost: float) -> None:
        """Refuse what costs too much: 413."""
        if cost > (most := self.options.max_cost):
            reason = f"this request costs {cost:.4g}, and the service allows {most:g} (max_cost)"
            raise HTTPException(413, f"{reason}: ask for fewer or shorter lists at once, or with fewer rules")

    def _charge(self, caller: str, cost: float) -> None:
        """Count what a request costs beyond 1; refuse it if the caller has to make up for earlier ones: 429."""
        if self.rates is not None and (seconds := self.rates.take(caller, max(0.0, cost - 1), needed=0.0)):
            reason = f"more than {self.options.rate:g} requests per second, weighted by cost"
            raise HTTPException(429, reason, retry_after(seconds))

    async def explain(self, question: schemas.Question, caller: str) -> list[float]:
        """Return what each event of a history adds to the score of an item.

        Raises:
            HTTPException: 404, the item or the candidate is unknown; 413 and 429, it costs too much.
        """
        batcher, request = self.batcher_of(question.by, question.user), question.request()
        recommender = batcher.served.current[0]
        cost = cost_of_explanation(request, recommender.events)
        self._check_cost(cost)
        self._charge(caller, cost)
        try:
            return await batcher.apart(lambda r: r.explain(request, question.item), recommender)
        except ValueError as error:
            raise HTTPException(404, str(error)) from error

    async def follow(self, load: Load, version: Callable[[], str], poll_s: float) -> None:
        """Serve what `load` returns whenever `version` has changed; until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            try:
                newest = await asyncio.to_thread(version)
                if newest and newest != self.version:
                    self.switch(await asyncio.to_thread(load), newest)
                    logger.info("serving version %s", newest)
                self.served.problem = ""
            except Exception as error:  # whatever a registry or a version in it may do; the next look may go well
                problem = f"{type(error).__name__}: {error}"[:500]
                if problem != self.served.problem:  # once, not at every look
                    logger.exception("a new champion cannot be loaded; version %s stays in use", self.version or "none")
                self.served.problem = problem

    @property
    def version(self) -> str:
        """The version of the champion that is served; empty if there is none yet."""
        return self.served.current[1] if self.served.ready else ""

    def state(self) -> schemas.State:
        """Return what is being served."""
        candidate = self.candidate.current[1] if self.candidate else ""
        if not self.served.ready:
            problem = self.served.problem or NO_CHAMPION
            return schemas.State(status="waiting", problem=problem, candidate=candidate)
        recommender, version = self.served.current
        return schemas.State(
            status="behind" if self.served.problem else "ok",
            problem=self.served.problem,
            model=recommender.name,
            version=version,
            candidate=candidate,
            items=len(recommender.item_ids),
            users=len(recommender.users),
        )
