"""What a request passes before the service reads it: key, rate, queue and time. FastAPI itself limits the body."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqrec.serving.config import ServeConfig
from seqrec.serving.keys import Key, Keys

OPEN = ("/", "/health", "/ready", "/metrics", "/openapi.json")  # no key, no rate
OPEN_BELOW = ("/docs", "/redoc", "/static", "/page")
ADMIN = (("DELETE", "/users/"), ("PUT", "/experiment"))  # method and beginning of the path
CALLERS = 10_000  # whose rates are known at once
BURST_S = 2.0  # so many seconds' requests may come at once
POLICY = "default-src 'none'; frame-ancestors 'none'"  # answers are data
PAGE = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"  # no script or style in the HTML
DOCS = ("/docs", "/redoc", "/docs/oauth2-redirect")  # pages of FastAPI, with scripts and styles in the HTML
SCRIPT = re.compile(rb"<script(?![^>]*src=)[^>]*>(.*?)</script>", re.DOTALL)


class Rates:
    """A token bucket for each caller; of those not seen for the longest time nothing is known any more."""

    def __init__(self, per_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self.now = per_second, now
        self.most = max(1.0, BURST_S * per_second)
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, caller: str) -> float:
        """Return 0 and count one request, or the seconds after which the next one may come."""
        tokens = self._tokens(caller)
        if tokens >= 1:
            self._keep(caller, tokens - 1)
            return 0.0
        self._keep(caller, tokens)
        return (1 - tokens) / self.per_second

    def charge(self, caller: str, cost: float) -> float:
        """Count a request's cost beyond the first one, or return the seconds after which the caller is out of debt.

        A dear request is granted whole, and the requests after it wait until its cost has been made up for.
        """
        tokens = self._tokens(caller)
        granted = tokens >= 0
        self._keep(caller, tokens - max(0.0, cost - 1) * granted)
        return 0.0 if granted else -tokens / self.per_second

    def _tokens(self, caller: str) -> float:
        tokens, seen = self.buckets.pop(caller, (self.most, self.now()))
        return min(self.most, tokens + (self.now() - seen) * self.per_second)

    def _keep(self, caller: str, tokens: float) -> None:
        self.buckets[caller] = (tokens, self.now())
        while len(self.buckets) > CALLERS:
            self.buckets.popitem(last=False)


class SafeHeaders:
    """ASGI middleware: browsers take answers for what they are called, and show none inside another page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and add the headers to its answer."""
        start: Message | None = None  # of a page, until its scripts are known

        async def sending(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Content-Security-Policy"] = PAGE if scope["path"] == "/" else POLICY
                if scope["path"] in DOCS:
                    start = message
                    return
            elif start is not None:
                MutableHeaders(scope=start)["Content-Security-Policy"] = docs_policy(message["body"])
                await send(start)
                start = None
            await send(message)

        await self.app(scope, receive, sending if scope["type"] == "http" else send)


def docs_policy(page: bytes) -> str:
    """Return what a page of the documentation may load: its own files, and the scripts in it as they are."""
    digests = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in SCRIPT.findall(page))
    scripts = " ".join(["script-src 'self'", *(f"'sha256-{digest}'" for digest in digests)])
    return f"{PAGE}; {scripts}; style-src 'self' 'unsafe-inline'; worker-src blob:"


class Guards:
    """ASGI middleware that refuses before anything of the body is read, and ends what takes too long."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServeConfig,
        rates: Rates | None,
        waiting: Callable[[], int],
        answered: Callable[[int], None],
    ) -> None:
        self.app, self.options, self.rates, self.waiting = app, options, rates, waiting
        self.answered = answered  # called with the HTTP status of each answer
        self.keys = Keys(options.keys) if options.keys else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN or scope["path"].startswith(OPEN_BELOW):
            await self.app(scope, receive, send)
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if not started:
                self.answered(message["status"])
            started = True
            await send(message)

        try:
            async with asyncio.timeout(self.options.timeout_s):
                await (self._refusal(scope) or self.app)(scope, receive, sending)
        except TimeoutError:
            if started:
                raise
            await _refused(504, f"no answer within {self.options.timeout_s:g} s")(scope, receive, sending)
        except Exception:  # becomes a 500 further out
            if not started:
                self.answered(500)
            raise

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        path = scope["path"]
        key = None
        if self.keys is not None:
            secret = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ")
            key = self.keys.find(secret)
            if key is None:
                return _refused(401, "send a valid key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
            if not key.admin and any(scope["method"] == m and path.startswith(p) for m, p in ADMIN):
                return _refused(403, "this key may not do that; an admin's may")
        return self._pressure(scope, key)

    def _pressure(self, scope: Scope, key: Key | None) -> JSONResponse | None:
        """Return the refusal where the caller, or everybody, asks for too much."""
        caller = key.name if key else (scope.get("client") or ("",))[0]
        scope.setdefault("state", {})["caller"] = caller
        if self.rates is not None and (seconds := self.rates.wait(caller)):
            return _refused(429, f"more than {self.options.rate:g} requests a second", after(seconds))
        if scope["path"].startswith("/recommend") and self.waiting() >= self.options.max_queue:
            return _refused(503, f"{self.options.max_queue} requests are waiting already", after(1))
        return None


def _refused(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": reason}, status, headers)


def after(seconds: float) -> dict[str, str]:
    """Return the header that says when to come back."""
    return {"Retry-After": str(math.ceil(seconds))}
