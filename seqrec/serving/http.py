"""The champion over HTTP: `python -m seqrec serve`.

Requests that arrive while the model works are answered together in its next pass, so that one connection never waits
for others and many share a matrix product. A new champion is loaded beside the old one, which answers until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Response
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest, start_http_server
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

import seqrec
from seqrec.artifacts import GRAPH_CARD, MAX_ID_LENGTH, MODEL_CARD, MODEL_PREFIX, read_json
from seqrec.config import ConfigError, RegisterConfig, ServeConfig, require
from seqrec.data import stores
from seqrec.serving import onnx_engine, open_inference, request_log, rules, schemas, traces
from seqrec.serving.async_store import WRITE_EVERY_S
from seqrec.serving.batcher import NO_CHAMPION, PassError, Served
from seqrec.serving.events import VARIABLE, Event, Store, StoreError, store_url
from seqrec.serving.guards import Guards, SafeHeaders
from seqrec.serving.keys import Keys
from seqrec.serving.recommender import REGISTERED, Answer, Recommender, located, numbered
from seqrec.serving.request_log import RequestLog
from seqrec.serving.server import Server, bound, taken
from seqrec.serving.service import Load, Service

logger = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "page"
STORED = ("/events", "/trending", "/users/{user:path}")  # routes that need a store
API_LINK = ' · <a href="/docs">API</a>'  # of the page
LOCAL = ("127.0.0.1", "::1", "localhost")
VALUES = 100  # of an attribute that the page offers


class Anything(PathConvertor):
    """An id in a path, whatever its characters: that of starlette ends before a line break."""

    regex = "(?s:.*)"


register_url_convertor("path", Anything())
REFUSED: dict[int | str, dict[str, Any]] = {
    404: {"description": "there is no candidate"},
    413: {"description": "the lists cost too much together"},
}
Text = Annotated[str, Query(max_length=MAX_ID_LENGTH)]
Days = Annotated[float, Query(gt=0, le=3_650, description="length of the window; it is compared with the one before")]
Number = Annotated[int, Query(ge=1, le=schemas.MAX_ITEMS, description="items wanted")]


def app(
    load: Load,
    version: Callable[[], str],
    options: ServeConfig,
    *,
    store: Store | None = None,
    candidate: Served | None = None,
) -> FastAPI:
    """Return the service.

    Args:
        load: returns the recommender to serve.
        version: names what `load` would return now, nothing if there is no champion yet; called every `poll_s`
            seconds, and a change is loaded.
        options: limits, keys and other options of the service.
        store: event store that records events and returns histories; without one the service keeps nothing.
        candidate: a second model, which answers a share of the users.

    Raises:
        ConfigError: there is no champion, and the service is not to look for one; or see `traces.trace`.
        ValueError: the file of keys is damaged.
        OSError: the file of keys cannot be read.
    """
    service = Service(options, store, candidate)
    keys = Keys(Path(options.keys)) if options.keys else None  # now: starlette makes its middleware after it listens
    if named := version():
        service.switch(load(), named)
    elif options.poll_s:
        logger.info("%s: run `make repro`; the service checks for a champion every %g s", NO_CHAMPION, options.poll_s)
    else:
        raise ConfigError(f"{NO_CHAMPION}: run `make repro` first, or let the service wait for one with --poll-s 30")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        work = [batcher.run() for batcher in service.batchers]
        if options.poll_s:
            work.append(service.follow(load, version, options.poll_s))
        if service.store is not None:
            work.append(service.store.write())
            if options.keep_days:
                work.append(service.store.expire(options.keep_days))
        tasks = [asyncio.create_task(one) for one in work]
        yield
        if service.store is not None:
            await service.store.flush()
        for task in tasks:
            task.cancel()

    documented = functools.partial(FastAPI, openapi_url=None) if options.metrics_port else FastAPIOffline
    api = documented(
        title="seqrec",
        version=seqrec.__version__,
        summary="What will this user want next?",
        lifespan=lifespan,
    )
    api.state.service = service
    api.add_middleware(RequestBodyLimitMiddleware, max_body_size=options.max_body)
    api.add_middleware(Guards, service=service, keys=keys)
    if options.origins:
        origins = [origin.strip() for origin in options.origins.split(",")]
        api.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    api.add_middleware(SafeHeaders)
    if options.log_format == "json":
        api.add_middleware(RequestLog)
    _add_recommending(api, service)
    open_inference.add_routes(api, service)
    _add_listing(api, service)
    if store is not None:
        _add_events(api, service, store)
    else:
        _add_missing(api, f"there is no store of events: start the service with --store or {VARIABLE}", STORED)
    if candidate is not None:
        _add_experiment(api, service)
    else:
        _add_missing(api, "there is no candidate: start the service with --candidate", ["/experiment"])
    _add_watching(api, service)
    if traces.wanted():
        traces.trace(api)
    return api


def _add_recommending(api: FastAPI, service: Service) -> None:
    @api.exception_handler(RequestValidationError)
    async def refused(_: HTTPRequest, error: RequestValidationError) -> JSONResponse:
        # without the input, which may hold what JSON cannot: NaN, half a surrogate pair
        return JSONResponse({"detail": [{key: e[key] for key in ("type", "loc", "msg")} for e in error.errors()]}, 422)

    @api.exception_handler(ImportError)  # of a package that only some models need
    @api.exception_handler(RuntimeError)
    async def failed(_: HTTPRequest, error: Exception) -> JSONResponse:
        if not isinstance(error, PassError):  # which was logged
            logger.error("the model failed", exc_info=error)
        return JSONResponse({"detail": "the model failed; the reason is in the log of the service"}, 503)

    @api.post("/recommend", responses=REFUSED)
    async def recommend(request: HTTPRequest, query: schemas.Query) -> schemas.Recommendation:
        """Recommend for one user."""
        answer = (await service.answer([query], request.state.caller))[0]
        request.state.version = answer.version
        return answer

    @api.post("/recommend/batch", responses=REFUSED)
    async def recommend_batch(request: HTTPRequest, queries: schemas.Queries) -> schemas.Recommendations:
        """Recommend for several users."""
        return schemas.Recommendations(answers=await service.answer(queries.requests, request.state.caller))


def _add_listing(api: FastAPI, service: Service) -> None:
    async def listing(answer: Callable[[Recommender], Answer]) -> schemas.Listing:
        recommender, version = service.served.current
        found = await service.batchers[0].apart(answer, recommender)
        return schemas.Listing(items=found.items, titles=found.titles, scores=found.scores, version=version)

    @api.get("/similar/{item:path}", responses={404: {"description": "the item is unknown"}})
    async def similar(item: str, k: Number = 10) -> schemas.Listing:
        """Return the items that the model holds most similar to one; scores are cosines."""
        try:
            return await listing(lambda recommender: recommender.similar(item.strip(), k))
        except KeyError as error:
            raise HTTPException(404, f"the model does not know the item {item!r:.100}") from error

    @api.get("/items")
    async def items(search: Text, k: Number = 10) -> schemas.SearchResult:
        """Return items by a part of their title, or by their id."""
        recommender = service.served.current[0]
        found = await service.batchers[0].apart(lambda recommender: recommender.search(search, k), recommender)
        return schemas.SearchResult(
            items=[schemas.Titled(item=item, title=recommender.titles.get(item, "")) for item in found]
        )

    @api.post("/explain", responses={404: {"description": "the item is unknown"}})
    async def explain(request: HTTPRequest, question: schemas.Question) -> schemas.Explanation:
        """Say by how much the score of an item drops when an event of the history is left out."""
        return schemas.Explanation(drops=await service.explain(question, request.state.caller))

    @api.get("/attributes")
    async def attributes() -> dict[str, list[str]]:
        """Return the attributes of items that rules may name, each with its commonest values."""
        known = service.served.current[0].attributes
        return await asyncio.to_thread(lambda: {name: known[name].by_frequency[:VALUES] for name in known})

    @api.get("/popular")
    async def popular(k: Number = 10) -> schemas.Listing:
        """Return the items with the most events in training; scores are their numbers."""
        return await listing(lambda recommender: recommender.popular(k))


def _add_events(api: FastAPI, service: Service, store: Store) -> None:
    @api.exception_handler(StoreError)
    async def down(_: HTTPRequest, error: Exception) -> JSONResponse:
        logger.error("%s", error)
        return JSONResponse({"detail": "the store of events does not answer"}, 503, {"Retry-After": "1"})

    @api.post("/events")
    async def events(body: schemas.Events) -> schemas.Taken:
        """Take what users did; what was taken before is left out, so a request may be repeated."""
        now = time.time()
        rows = [Event(**{**vars(event), "at": now if event.at is None else event.at}) for event in body.events]
        stored = await asyncio.to_thread(store.add, rows)
        return schemas.Taken(stored=stored, known=len(rows) - stored)

    @api.get("/trending")
    async def trending(k: Number = 10, days: Days = 7.0) -> schemas.Listing:
        """Return the items with the largest gain in views and buys; scores are ratios to as many days before.

        Counting is repeated after a minute at the earliest.
        """
        recommender, version = service.served.current
        gains = await service.trends.get(days, lambda: store.trending(days, schemas.MAX_ITEMS, time.time()))
        items, scores = [item for item, _ in gains[:k]], [gain for _, gain in gains[:k]]
        titles = [recommender.titles.get(item, "") for item in items]
        return schemas.Listing(items=items, titles=titles, scores=scores, version=version)

    @api.get("/users/{user:path}")
    async def history(user: str) -> schemas.History:
        """Return the newest events of a user that the store knows, without hidden items, oldest first."""
        user = user.strip()  # as in a body
        items = (await asyncio.to_thread(store.histories, [user]))[user].items
        titles = service.served.current[0].titles
        return schemas.History(items=items, titles=[titles.get(item, "") for item in items])

    @api.delete("/users/{user:path}")
    async def forget(user: str) -> schemas.Forgotten:
        """Delete what the store knows of a user; the model forgets when it is trained again without these events."""
        assert service.store is not None  # it writes to `store`
        await service.store.flush()
        names = {user.strip(), user}  # an earlier version stored ids with their blanks
        found = [await asyncio.to_thread(store.forget, name) for name in names]
        await asyncio.sleep(3 * WRITE_EVERY_S)  # until other processes have written what they showed
        found += [await asyncio.to_thread(store.forget, name) for name in names]
        return schemas.Forgotten(**{what: sum(deleted[what] for deleted in found) for what in found[0]})


def _add_missing(api: FastAPI, reason: str, paths: Iterable[str]) -> None:
    async def missing() -> None:
        raise HTTPException(404, reason)

    for path in paths:
        api.add_api_route(path, missing, methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)


def _add_experiment(api: FastAPI, service: Service) -> None:
    @api.get("/experiment", responses={404: {"description": "there is no store"}})
    async def experiment() -> schemas.Experiment:
        """Compare the candidate with the champion, by the answers that led to a view or a purchase."""
        return await service.experiment()

    @api.put("/experiment")
    async def share(wanted: schemas.Share) -> schemas.Share:
        """Set the share of the users whom the candidate answers, until the service ends."""
        service.share = wanted.share
        logger.info("the candidate now answers a share of %g of the users", wanted.share)
        return wanted


def _add_watching(api: FastAPI, service: Service) -> None:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    if service.options.metrics_port:
        page = page.replace(API_LINK, "")

    @api.get("/", include_in_schema=False)
    async def root() -> HTMLResponse:
        return HTMLResponse(page)

    api.mount("/page", StaticFiles(directory=PAGE))

    @api.head("/health", include_in_schema=False)  # as some load balancers ask
    @api.get("/health")
    async def health() -> schemas.State:
        """Say what is being served."""
        return service.state()

    @api.head("/ready", include_in_schema=False)
    @api.get("/ready", responses={503: {"model": schemas.Readiness}})
    async def ready(response: Response) -> schemas.Readiness:
        """Say whether to send requests here: not before there is a champion, nor while it waits for its end."""
        response.status_code = 200 if service.ready else 503
        return schemas.Readiness(ready=service.ready)

    if service.options.metrics_port:
        return

    @api.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """Return figures for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def serve(*, dataset: str, config: RegisterConfig, options: ServeConfig) -> None:
    """Serve the champion of `dataset` until interrupted.

    Args:
        dataset: dataset whose champion is served.
        config: section `register`.
        options: section `serve`: the model, the address, and limits of the service.

    Raises:
        TrackingError: the server does not answer.
        ValueError: there is no such model, its graph was written from other weights, the port is taken, a file is
            missing, or an option has no effect.
    """
    if options.log_format == "json":
        request_log.write_json()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exit that removes temporary folders
    url = store_url(options.store)
    require(bool(url) or not options.keep_days, f"keep_days has no effect without a store: set --store or {VARIABLE}")
    require(bool(options.candidate) or options.share == ServeConfig.share, "share has no effect without a candidate")
    for name, path in (("keys", options.keys), ("items", options.items)):
        require(not path or "://" in path or Path(path).exists(), f"--{name}: there is no file {path}")
    if not options.keys and options.host not in LOCAL:
        logger.warning("whoever reaches %s may use the service: set --keys, see `seqrec keys`", options.host)
    with bound(options.host, options.port) as listener:
        load, version = _served(dataset, config, options)
        candidate = _candidate(config, options, version()) if options.candidate else None
        store = Store(url, patience_s=2 * options.timeout_s) if url else None
        service = app(load, version, options, store=store, candidate=candidate)
        if options.metrics_port:
            try:
                start_http_server(options.metrics_port, options.host, service.state.service.metrics.registry)
            except OSError as error:
                raise taken(options.host, options.metrics_port, error, "--host and --metrics-port") from error
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has ended
            Server(service).run([listener])


def _served(dataset: str, config: RegisterConfig, options: ServeConfig) -> tuple[Load, Callable[[], str]]:
    """Return what loads the model to serve, and what names its version; of champions, the one named last is loaded."""
    if options.saved:
        saved = numbered(options.saved, config)
        recommender, number = loaded(saved, config, options), version_of(saved, config)
        return lambda: recommender, lambda: number
    from seqrec.tracking import registry  # MLflow takes seconds to import

    named = ""

    def version() -> str:
        nonlocal named
        named = registry.alias_version(name=MODEL_PREFIX + dataset, alias=registry.CHAMPION, config=config)
        return named

    if not version() and (others := registry.datasets(config)):
        logger.warning("no model of %s is the champion; models are registered of %s", dataset, ", ".join(others))
    return lambda: loaded(f"models:/{MODEL_PREFIX}{dataset}/{named}", config, options), version


def _candidate(config: RegisterConfig, options: ServeConfig, champion_version: str) -> Served | None:
    """Return the candidate; None if its alias names no version, or the champion, which then answers everybody."""
    alias = options.candidate.startswith("models:/") and "@" in options.candidate
    try:
        candidate = numbered(options.candidate, config)
        version = version_of(candidate, config)
        if version == champion_version:
            raise ConfigError(f"candidate: {options.candidate} is the champion itself; name another version")
    except ValueError as error:
        if not alias:
            raise
        logger.warning("%s; the champion answers everybody until the service starts again", error)
        return None
    return Served(loaded(candidate, config, options), version)


def loaded(place: str, config: RegisterConfig, options: ServeConfig) -> Recommender:
    """Return the model at a place, see `located`; it runs its ONNX graph unless it has none or `ann` is set."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(located(place, config))
        if (folder / GRAPH_CARD).is_file() and not options.ann:
            recommender = onnx_engine.load(folder, options.threads, keep=stack.pop_all())
        else:
            import torch

            torch.set_num_threads(options.threads)
            if options.ann:
                from seqrec.serving import approximate_search

                recommender = approximate_search.load(folder, options.ann)
            else:
                recommender = Recommender.load(folder)
    if options.items:
        with stores.local(options.items) as file:
            recommender.attributes = rules.Attributes.read(file, recommender.item_ids)
    return recommender


def version_of(place: str, config: RegisterConfig) -> str:
    """Return the version of the model at `place`: its number in the registry, or a name and a hash of the model."""
    name = Path(place).name
    if place.startswith(REGISTERED) and name.isdecimal():
        return name
    with located(place, config) as folder:
        card = read_json(folder / MODEL_CARD)
    digests = card["weights_sha256"] + card.get("counts", {}).get("sha256", "")
    return f"{name}-{hashlib.sha256(digests.encode()).hexdigest()[:8]}"
