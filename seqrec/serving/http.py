"""The champion over HTTP: `python -m seqrec serve`.

Requests that arrive while the model works are answered together in its next pass, so that one connection never waits
for others and many share a matrix product. A new champion is loaded beside the old one, which answers until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Self

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from seqrec import __version__
from seqrec.config import RegisterConfig
from seqrec.serving.onnx_graph import GraphRecommender
from seqrec.serving.recommender import CHAMPION_URI, Answer, Recommender, Request

logger = logging.getLogger(__name__)
EVENTS = 10_000  # of a history; a body is held in memory
ROWS = 1_000  # requests of a batch
DECILES = 10
Load = Callable[[], Recommender]
Waiting = tuple[Request, asyncio.Future[tuple[Answer, str]]]

NEW_ITEMS, ATTRIBUTES = 100, 20  # described in a request, and of each

Id = Annotated[str, Field(max_length=1_000)]
Text = Annotated[str, Field(max_length=4_000)]


class Query(BaseModel):
    """Somebody's past, and what is wanted; every id is the data source's own."""

    model_config = ConfigDict(extra="forbid")

    history: list[Id] = Field(max_length=EVENTS, description="item ids, oldest first", examples=[["50", "181"]])
    k: int = Field(10, ge=1, description="items wanted; there are fewer where the catalogue has no more")
    exclude: list[Id] = Field([], max_length=EVENTS, description="item ids not to show")
    user: Id | None = Field(None, description="user id; an unknown one is fine")
    times: list[FiniteFloat] | None = Field(None, description="seconds UTC, one an event of the history")
    items_text: dict[Id, Annotated[dict[Id, Text], Field(max_length=ATTRIBUTES)]] = Field(
        {},
        max_length=NEW_ITEMS,
        description="items that the model never saw: id -> attributes; candidates, also in the history; Recformer only",
        examples=[{"new": {"title": "A film of tomorrow"}}],
    )

    titles: bool = Field(False, description="answer with the titles of the items too")

    @model_validator(mode="after")
    def _times_match(self) -> Self:
        self.request()
        return self

    def request(self) -> Request:
        """Return what the recommender understands."""
        return Request(**{name: value for name, value in vars(self).items() if name != "titles"})


class Queries(BaseModel):
    """Several at once."""

    model_config = ConfigDict(extra="forbid")

    requests: list[Query] = Field(max_length=ROWS)


class Recommendation(BaseModel):
    """The best items, and what was done to give any."""

    items: list[str] = Field(description="best first")
    titles: list[str] | None = Field(None, description="of the items, if requested; empty where the model has none")
    scores: list[float]
    source: str = Field(description="the model, or popularity where no item of the history is known")
    unknown: int = Field(description="events of the history that the model does not know")
    notes: list[str]
    version: str = Field(description="of the model in the registry")


class Recommendations(BaseModel):
    """Several at once, in the order of the requests."""

    answers: list[Recommendation]


class State(BaseModel):
    """What is being served."""

    status: str = Field(description="ok, or behind: it answers, but cannot follow the registry")
    model: str
    version: str
    items: int
    users: int
    problem: str = Field(description="why a newer champion is not served; empty where nothing is wrong")


class Served:
    """The recommender in use and its version; both change in one assignment."""

    def __init__(self, recommender: Recommender, version: str) -> None:
        self.current = (recommender, version)
        self.problem = ""  # why the registry's champion is not the one that is served, if anything is wrong


class Batcher:
    """Hands all waiting requests to the model as one batch; the next one gathers while it works."""

    def __init__(self, served: Served, largest: int, seen: Callable[[int], None]) -> None:
        self.served, self.largest, self.seen = served, largest, seen
        self.queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self.worker = ThreadPoolExecutor(1, "model")

    async def answer(self, request: Request) -> tuple[Answer, str]:
        """Return the answer, and the version of the model that gave it.

        Raises:
            ValueError: see `Recommender.check`.
            RuntimeError: the model failed.
        """
        future: asyncio.Future[tuple[Answer, str]] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((request, future))
        return await future

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            waiting = [await self.queue.get()]
            while len(waiting) < self.largest and not self.queue.empty():
                waiting.append(self.queue.get_nowait())
            recommender, version = self.served.current
            waiting = self._able(recommender, waiting)
            if not waiting:
                continue
            self.seen(len(waiting))
            requests = [request for request, _ in waiting]
            try:
                answers = await loop.run_in_executor(self.worker, recommender.answer, requests)
            except Exception as error:  # one batch fails, the service goes on
                logger.exception("a batch of %d failed", len(waiting))
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(RuntimeError(str(error)))
                continue
            for (_, future), answer in zip(waiting, answers, strict=True):
                if not future.done():  # the caller may have gone
                    future.set_result((answer, version))

    @staticmethod
    def _able(recommender: Recommender, waiting: Sequence[Waiting]) -> list[Waiting]:
        """Return who can be answered; the others get the ValueError, and spoil nobody's batch."""
        able = []
        for request, future in waiting:
            try:
                recommender.check(request)
            except ValueError as error:
                if not future.done():
                    future.set_exception(error)
            else:
                able.append((request, future))
        return able


class Metrics:
    """What Prometheus reads, in a registry of its own.

    Histories are compared with training by popularity: each decile of items, by train events, had a tenth of them.
    """

    def __init__(self, served: Served) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series a counter, of no use
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter("seqrec_requests", "answers by what gave them", ["source"], registry=own)
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
        self.decile = Counter(
            "seqrec_history_popularity", "known events by decile, 0 the most popular", ["decile"], registry=own
        )
        self.expected = Gauge("seqrec_training_events_per_user", "mean train events of a user", registry=own)
        self.version = Gauge("seqrec_model", "1 for the version that is served", ["name", "version"], registry=own)
        self.switch(served)

    def switch(self, served: Served) -> None:
        """Take the figures of the model that is served now."""
        recommender, version = served.current
        self.version.clear()
        self.version.labels(recommender.name, version).set(1)
        self.expected.set(float(recommender.counts.sum()) / max(1, len(recommender.users)))
        order = recommender.counts.argsort(descending=True, stable=True)
        before = recommender.counts[order].cumsum(0) - recommender.counts[order]
        share = before / recommender.counts.sum().clamp(min=1)
        self.deciles = torch.empty_like(order)
        self.deciles[order] = (share * DECILES).long().clamp(max=DECILES - 1)

    def count(self, recommender: Recommender, request: Request, answer: Answer, seconds: float) -> None:
        """Account for one answer."""
        self.requests.labels(answer.source).inc()
        self.latency.observe(seconds)
        self.length.observe(len(request.history))
        self.unknown.inc(answer.unknown)
        known = [recommender.items[item_id] for item_id in request.history if item_id in recommender.items]
        for decile, number in enumerate(torch.bincount(self.deciles[known], minlength=DECILES).tolist()):
            self.decile.labels(str(decile)).inc(number)


class Service:
    """What answers: the served model, its batches and figures."""

    def __init__(self, served: Served, largest: int) -> None:
        self.served = served
        self.metrics = Metrics(served)
        self.batcher = Batcher(served, largest, self.metrics.batch.observe)

    async def answer(self, queries: Sequence[Query]) -> list[Recommendation]:
        """Return the recommendations for `queries`.

        Raises:
            RequestValidationError: see `Recommender.check`.
            HTTPException: 503, the model failed.
        """
        requests = [query.request() for query in queries]
        began = time.perf_counter()
        try:
            answers = await asyncio.gather(*map(self.batcher.answer, requests))
        except ValueError as error:
            reason = {"type": "value_error", "loc": ("body",), "msg": str(error)}
            raise RequestValidationError([reason]) from error
        except RuntimeError as error:
            raise HTTPException(503, "the model failed; the log of the service says why") from error
        seconds = time.perf_counter() - began
        for request, (answer, _) in zip(requests, answers, strict=True):
            self.metrics.count(self.served.current[0], request, answer, seconds)
        return [
            Recommendation(**{**vars(answer), "version": number, "titles": answer.titles if query.titles else None})
            for query, (answer, number) in zip(queries, answers, strict=True)
        ]

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
                    logger.exception("the registry gave no new champion; version %s stays", self.served.current[1])
                self.served.problem = problem

    def state(self) -> State:
        """Return what is being served."""
        recommender, number = self.served.current
        sizes = {"items": len(recommender.item_ids), "users": len(recommender.users)}
        status = "behind" if self.served.problem else "ok"
        return State(status=status, model=recommender.name, version=number, problem=self.served.problem, **sizes)


def app(
    load: Load,
    version: Callable[[], str],
    *,
    poll_s: float = 30.0,
    largest: int = 64,
) -> FastAPI:
    """Return the service.

    Args:
        load: returns the recommender to serve.
        version: names what `load` would return now; called every `poll_s` seconds, and a change is loaded.
        poll_s: seconds between looks; 0 = never.
        largest: requests answered in one pass.
    """
    named = version()
    service = Service(Served(load(), named), largest)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(service.batcher.run())]
        if poll_s:
            tasks.append(asyncio.create_task(service.follow(load, version, poll_s)))
        yield
        for task in tasks:
            task.cancel()

    api = FastAPIOffline(
        title="seqrec", version=__version__, summary="What will this user want next?", lifespan=lifespan
    )
    _add_recommending(api, service)
    _add_watching(api, service)
    return api


def _add_recommending(api: FastAPI, service: Service) -> None:
    @api.exception_handler(RequestValidationError)
    async def refused(_: HTTPRequest, error: RequestValidationError) -> JSONResponse:
        # without the input, which may hold what JSON cannot: NaN, half a surrogate pair
        return JSONResponse({"detail": [{key: e[key] for key in ("type", "loc", "msg")} for e in error.errors()]}, 422)

    @api.post("/recommend")
    async def recommend(query: Query) -> Recommendation:
        """Recommend for one user."""
        return (await service.answer([query]))[0]

    @api.post("/recommend/batch")
    async def recommend_batch(queries: Queries) -> Recommendations:
        """Recommend for several users."""
        return Recommendations(answers=await service.answer(queries.requests))


def _add_watching(api: FastAPI, service: Service) -> None:
    @api.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/docs")

    @api.get("/health")
    async def health() -> State:
        """Say what is being served."""
        return service.state()

    @api.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """Return figures for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def serve(
    *,
    dataset: str,
    config: RegisterConfig,
    saved: str = "",
    graph: Path | None = None,
    ann: int = 0,
    host: str = "127.0.0.1",
    port: int = 8000,
    poll_s: float = 30.0,
    batch: int = 64,
    threads: int = 1,
) -> None:
    """Serve the champion of `dataset` until interrupted.

    Args:
        dataset: whose champion.
        config: section `register`.
        saved: served in the champion's place: a folder with weights, card, vocabulary and users, or models:/NAME/N.
        graph: folder that `export` wrote for the model in `saved`; onnxruntime then computes the answers.
        ann: candidates of an approximate search of the items, for large catalogues; 0 = all items are scored.
        host: address to listen on; 0.0.0.0 for all.
        port: to listen on.
        poll_s: seconds between looks for a new champion; 0 = never.
        batch: requests answered in one pass at most.
        threads: of torch.

    Raises:
        TrackingError: the server does not answer.
        ValueError: there is no such model, or the graph is of other weights.
    """
    torch.set_num_threads(threads)
    if ann and graph is not None:
        raise ValueError("ann: an exported graph scores all items; leave out --graph")
    if saved:
        found = GraphRecommender.of(saved, graph, threads, config) if graph else loaded(saved, ann, config)
        name = Path(saved).name
        service = app(lambda: found, lambda: name, poll_s=0, largest=batch)
    elif graph is not None:
        raise ValueError("graph: name the folder of the model as well, --saved")
    else:
        service = app(*champion(dataset, config, ann), poll_s=poll_s, largest=batch)
    logger.info("http://%s:%d answers; try it at /docs", host, port)
    uvicorn.run(service, host=host, port=port, log_level="warning", access_log=False)


def loaded(place: str, ann: int, config: RegisterConfig) -> Recommender:
    """Return the model at `place`; `ann`: see `serve`."""
    if not ann:
        return Recommender.load(place, config)
    from seqrec.serving.approximate_search import ApproximateRecommender

    return ApproximateRecommender.of(place, ann, config)


def champion(dataset: str, config: RegisterConfig, ann: int = 0) -> tuple[Load, Callable[[], str]]:
    """Return what loads the champion of `dataset`, and what names its version; `ann`: see `serve`."""
    from seqrec.tracking import registry  # MLflow takes seconds to import

    def load() -> Recommender:
        return loaded(CHAMPION_URI.format(dataset=dataset), ann, config)

    return load, lambda: registry.champion_version(dataset=dataset, config=config)
