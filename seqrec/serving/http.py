"""The champion over HTTP: `python -m seqrec serve`.

Requests that arrive while the model works are answered together in its next pass, so that one connection never waits
for others and many share a matrix product. A new champion is loaded beside the old one, which answers until then.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Response
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from seqrec import __version__
from seqrec.artifacts import GRAPH, MODEL_CARD, read_json
from seqrec.config import ConfigError, RegisterConfig
from seqrec.serving import request_log, rules, schemas, traces
from seqrec.serving.batcher import Served
from seqrec.serving.events import Event, Store, StoreError, store_url
from seqrec.serving.guards import Guards, Limits
from seqrec.serving.onnx_graph import GraphRecommender
from seqrec.serving.recommender import CHAMPION_URI, REGISTERED, Answer, Recommender, Request, located
from seqrec.serving.request_log import RequestLog
from seqrec.serving.schemas import (
    Experiment,
    Forgotten,
    Found,
    Listing,
    Queries,
    Readiness,
    Recommendation,
    Recommendations,
    Share,
    State,
    Taken,
    Titled,
)
from seqrec.serving.service import Load, Service

logger = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'self'; img-src 'self' data:"  # of the page: nothing from elsewhere, no script in the HTML
LOG_FORMATS = ("text", "json")
VALUES = 100  # of an attribute that the page offers
MOST = 1_000  # items of a list that is nobody's in particular
NO_CANDIDATE: dict[int | str, dict[str, Any]] = {404: {"description": "there is no candidate"}}
Text = Annotated[str, Query(max_length=200)]
Days = Annotated[float, Query(gt=0, le=3_650, description="of the window, and of the one before it")]
Number = Annotated[int, Query(ge=1, le=MOST, description="items wanted")]


def app(
    load: Load,
    version: Callable[[], str],
    *,
    poll_s: float = 30.0,
    largest: int = 64,
    limits: Limits | None = None,
    origins: Sequence[str] = (),
    store: Store | None = None,
    keep_days: float = 0.0,
    candidate: Served | None = None,
    share: float = 0.0,
    log_requests: bool = False,
) -> FastAPI:
    """Return the service.

    Args:
        load: returns the recommender to serve.
        version: names what `load` would return now; called every `poll_s` seconds, and a change is loaded.
        poll_s: seconds between looks; 0 = never.
        largest: requests answered in one pass.
        limits: how much it takes, and from whom.
        origins: of web pages that may ask it from a browser, besides its own.
        store: of events: takes them, and knows histories; without one the service keeps nothing.
        keep_days: after which what the store received is deleted; 0 = never.
        candidate: a second model, which answers the `share` of the users.
        share: of the users, 0 to 1.
        log_requests: write a line for each request, see `request_log`.

    Raises:
        ConfigError: see `traces.trace`.
    """
    named = version()
    service = Service(Served(load(), named), largest, store, candidate, share)
    gc.freeze()  # what lives as long as the service: looking through it for garbage took a tenth of a second

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(batcher.run()) for batcher in service.batchers]
        if poll_s:
            tasks.append(asyncio.create_task(service.follow(load, version, poll_s)))
        if store is not None and keep_days:
            tasks.append(asyncio.create_task(service.expire(store, keep_days)))
        if service.impressions is not None:
            tasks.append(asyncio.create_task(service.impressions.run()))
        yield
        if service.impressions is not None:
            await service.impressions.flush()
        for task in tasks:
            task.cancel()

    limits = limits or Limits()
    api = FastAPIOffline(
        title="seqrec",
        version=__version__,
        summary="What will this user want next?",
        lifespan=lifespan,
        max_body_size=limits.body,
    )
    api.state.service = service
    responses = service.metrics.responses
    api.add_middleware(
        Guards,
        limits=limits,
        waiting=service.waiting,
        answered=lambda status: responses.labels(str(status)).inc(),
    )
    if origins:
        api.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    if log_requests:
        api.add_middleware(RequestLog)
    _add_recommending(api, service)
    _add_listing(api, service)
    if store is not None:
        _add_events(api, service, store)
    if candidate is not None:
        _add_experiment(api, service)
    _add_watching(api, service)
    if traces.wanted():
        traces.trace(api)
    return api


def _add_recommending(api: FastAPI, service: Service) -> None:
    @api.exception_handler(RequestValidationError)
    async def refused(_: HTTPRequest, error: RequestValidationError) -> JSONResponse:
        # without the input, which may hold what JSON cannot: NaN, half a surrogate pair
        return JSONResponse({"detail": [{key: e[key] for key in ("type", "loc", "msg")} for e in error.errors()]}, 422)

    @api.post("/recommend", responses=NO_CANDIDATE)
    async def recommend(request: HTTPRequest, query: schemas.Query) -> Recommendation:
        """Recommend for one user."""
        answer = (await service.answer([query]))[0]
        request.state.version = answer.version
        return answer

    @api.post("/recommend/batch", responses=NO_CANDIDATE)
    async def recommend_batch(queries: Queries) -> Recommendations:
        """Recommend for several users."""
        return Recommendations(answers=await service.answer(queries.requests))


def _add_listing(api: FastAPI, service: Service) -> None:
    async def listing(answer: Callable[[Recommender], Answer]) -> Listing:
        recommender, version = service.served.current
        found = await service.batcher.apart(answer, recommender)
        return Listing(items=found.items, titles=found.titles, scores=found.scores, version=version)

    @api.get("/similar/{item:path}", responses={404: {"description": "the item is unknown"}})
    async def similar(item: str, k: Number = 10) -> Listing:
        """Return the items that the model holds most similar to one; scores are cosines."""
        try:
            return await listing(lambda recommender: recommender.similar(item, k))
        except KeyError as error:
            raise HTTPException(404, f"the model does not know the item {item!r:.100}") from error

    @api.get("/items")
    async def items(search: Text, k: Number = 10) -> Found:
        """Return items by a part of their title, or by their id."""
        recommender = service.served.current[0]
        found = await asyncio.to_thread(recommender.search, search, k)
        return Found(items=[Titled(item=item, title=recommender.titles.get(item, "")) for item in found])

    @api.post("/explain", responses={404: {"description": "the item is unknown"}})
    async def explain(question: schemas.Question) -> schemas.Explanation:
        """Say by how much the score of an item drops when an event of the history is left out."""
        request, batcher = Request(history=question.history, user=question.user), service.asked(question.by)
        try:
            drops = await batcher.apart(lambda r: r.explain(request, question.item), batcher.served.current[0])
        except ValueError as error:
            raise HTTPException(404, str(error)) from error
        return schemas.Explanation(drops=drops)

    @api.get("/attributes")
    async def attributes() -> dict[str, list[str]]:
        """Return the attributes of items that rules may name, each with its commonest values."""
        known = service.served.current[0].attributes
        return {name: await asyncio.to_thread(known[name].commonest, VALUES) for name in known}

    @api.get("/popular")
    async def popular(k: Number = 10) -> Listing:
        """Return the items with the most events in training; scores are their numbers."""
        return await listing(lambda recommender: recommender.popular(k))


def _add_events(api: FastAPI, service: Service, store: Store) -> None:
    @api.exception_handler(StoreError)
    async def down(_: HTTPRequest, error: Exception) -> JSONResponse:
        logger.error("%s", error)
        return JSONResponse({"detail": "the store of events does not answer"}, 503, {"Retry-After": "1"})

    @api.post("/events")
    async def events(body: schemas.Events) -> Taken:
        """Take what users did; what was taken before is left out, so a request may be repeated."""
        now = time.time()
        rows = [Event(**{**vars(event), "at": now if event.at is None else event.at}) for event in body.events]
        stored = await asyncio.to_thread(store.add, rows)
        return Taken(stored=stored, known=len(rows) - stored)

    @api.get("/trending")
    async def trending(k: Number = 10, days: Days = 7.0) -> Listing:
        """Return the items with the largest gain in views and buys; scores are ratios to as many days before."""
        recommender, version = service.served.current
        found = await asyncio.to_thread(store.trending, days, k, time.time())
        titles = [recommender.titles.get(item, "") for item, _ in found]
        return Listing(items=[i for i, _ in found], titles=titles, scores=[s for _, s in found], version=version)

    @api.delete("/users/{user:path}")
    async def forget(user: str) -> Forgotten:
        """Delete what the store knows of a user; the model forgets when it is trained again without these events."""
        if service.impressions is not None:
            await service.impressions.flush()
        return Forgotten(**await asyncio.to_thread(store.forget, user))


def _add_experiment(api: FastAPI, service: Service) -> None:
    @api.get("/experiment", responses={404: {"description": "there is no store"}})
    async def experiment() -> Experiment:
        """Compare the candidate with the champion, by the answers that led to a view or a purchase."""
        return await service.experiment()

    @api.put("/experiment")
    async def share(wanted: Share) -> Share:
        """Set the share of the users whom the candidate answers, until the service ends."""
        service.share = wanted.share
        logger.info("the candidate answers a share of %g of the users", wanted.share)
        return wanted


def _add_watching(api: FastAPI, service: Service) -> None:
    @api.get("/", include_in_schema=False)
    async def root() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": POLICY})

    api.mount("/page", StaticFiles(directory=PAGE))

    @api.get("/health")
    async def health() -> State:
        """Say what is being served."""
        return service.state()

    @api.get("/ready", responses={503: {"model": Readiness}})
    async def ready(response: Response) -> Readiness:
        """Say whether to send requests here: not while it waits for its end."""
        response.status_code = 503 if service.draining else 200
        return Readiness(ready=not service.draining)

    @api.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """Return figures for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def serve(
    *,
    dataset: str,
    config: RegisterConfig,
    saved: str = "",
    ann: int = 0,
    items: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    poll_s: float = 30.0,
    batch: int = 64,
    threads: int = 1,
    keys: Path | None = None,
    rate: float = Limits.rate,
    max_body: int = Limits.body,
    max_queue: int = Limits.queue,
    timeout_s: float = Limits.timeout_s,
    drain_s: float = 5.0,
    origins: str = "",
    store: str = "",
    keep_days: float = 0.0,
    candidate: str = "",
    share: float = 0.1,
    log_format: str = "text",
) -> None:
    """Serve the champion of `dataset` until interrupted.

    Args:
        dataset: whose champion.
        config: section `register`.
        saved: served in the champion's place: a folder with weights, card, vocabulary and users, or models:/NAME/N.
        ann: candidates of an approximate search of the items, for large catalogues; 0 = all items are scored.
        items: the items table of `ingest`, data/items.parquet; requests may then filter by its attributes.
        host: address to listen on; 0.0.0.0 for all.
        port: to listen on.
        poll_s: seconds between looks for a new champion; 0 = never.
        batch: requests answered in one pass at most.
        threads: that compute a pass.
        keys: file of `seqrec keys`: whoever asks must then send a key.
        rate: requests a second of one key, or of one address without keys; above it 429. 0 = any.
        max_body: bytes of a request's body; above it 413.
        max_queue: requests waiting for the model; above it 503 with Retry-After.
        timeout_s: seconds until a request without an answer gets 504.
        drain_s: seconds after SIGTERM in which it answers on, while /ready is 503.
        origins: of web pages that may ask it from a browser, with commas between them; none by default.
        store: SQLAlchemy URL of a store of events, such as sqlite:///events.db; default: the variable SEQREC_STORE.
        keep_days: after which what the store received is deleted; 0 = never.
        candidate: a second model beside the champion, for some of the users: a folder or models:/NAME/N.
        share: of the users whom the candidate answers, 0 to 1.
        log_format: text; or json: a line of JSON for each message and each request.

    Raises:
        TrackingError: the server does not answer.
        ValueError: there is no such model, or its graph is of other weights.
    """
    if log_format not in LOG_FORMATS:
        raise ValueError(f"log_format: {log_format!r} given, one of {', '.join(LOG_FORMATS)} wanted")
    if log_format == "json":
        request_log.write_json()
    torch.set_num_threads(threads)
    limits = Limits(keys=keys, rate=rate, body=max_body, queue=max_queue, timeout_s=timeout_s)
    shared: dict[str, Any] = {"largest": batch, "limits": limits, "origins": origins.split(",") if origins else ()}
    shared["log_requests"] = log_format == "json"
    if store_url(store):
        shared |= {"store": Store(store_url(store)), "keep_days": keep_days}
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, not {share:g}")
    load: Load
    version: Callable[[], str]
    if saved:
        found, name = described(loaded(saved, ann, config), items), version_of(saved, config)
        load, version, poll_s = lambda: found, lambda: name, 0
    else:
        load, version = champion(dataset, config, ann, items)
    if candidate:
        other = version_of(candidate, config)
        if other == version():
            raise ConfigError(f"candidate: {candidate} is the model that it would be compared with")
        shared |= {"candidate": Served(described(loaded(candidate, ann, config), items), other), "share": share}
    service = app(load, version, poll_s=poll_s, **shared)
    logger.info("http://%s:%d answers; open it in a browser to try the model", host, port)
    options: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "timeout_graceful_shutdown": math.ceil(timeout_s),
    }
    Server(uvicorn.Config(service, host=host, port=port, **options), service.state.service, drain_s).run()


class Server(uvicorn.Server):
    """A server that answers on for some seconds after SIGTERM, until balancers have read /ready and send no more."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float) -> None:
        super().__init__(config)
        self.service, self.drain_s = service, drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End: after the time to drain on the first SIGTERM, at once on a second one or on Ctrl-C."""
        if sig != signal.SIGTERM or self.service.draining or not self.drain_s:
            super().handle_exit(sig, frame)
            return
        self.service.draining = True
        timer = threading.Timer(self.drain_s, super().handle_exit, (sig, frame))
        timer.daemon = True
        timer.start()


def loaded(place: str, ann: int, config: RegisterConfig) -> Recommender:
    """Return the model at `place`, which runs its ONNX graph if it has one; `ann`: see `serve`."""
    if ann:
        from seqrec.serving.approximate_search import ApproximateRecommender

        return ApproximateRecommender.of(place, ann, config)
    with located(place, config) as folder:
        if (folder / GRAPH).is_file():
            return GraphRecommender.of(folder, torch.get_num_threads())
        return Recommender.load(folder)


def version_of(place: str, config: RegisterConfig) -> str:
    """Return the version of the model at `place`: its number in the registry, or a name with a hash of its weights."""
    name = Path(place).name
    if place.startswith(REGISTERED) and name.isdecimal():
        return name
    with located(place, config) as folder:
        return f"{name}-{read_json(folder / MODEL_CARD)['weights_sha256'][:8]}"


def described(recommender: Recommender, items: Path | None) -> Recommender:
    """Return the recommender, which knows the attributes in the table `items` from now on."""
    if items is not None:
        recommender.attributes = rules.Attributes.read(items, recommender.item_ids)
    return recommender


def champion(
    dataset: str, config: RegisterConfig, ann: int = 0, items: Path | None = None
) -> tuple[Load, Callable[[], str]]:
    """Return what loads the champion of `dataset`, and what names its version; `ann`, `items`: see `serve`."""
    from seqrec.tracking import registry  # MLflow takes seconds to import

    def load() -> Recommender:
        return described(loaded(CHAMPION_URI.format(dataset=dataset), ann, config), items)

    return load, lambda: registry.champion_version(dataset=dataset, config=config)
