"""What a request passes before the service reads it: key, rate, queue and time. FastAPI itself limits the body."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqrec.serving.keys import Key, Keys

OPEN = ("/", "/health", "/ready", "/metrics", "/openapi.json")  # no key, no rate
OPEN_BELOW = ("/docs", "/redoc", "/static", "/page")
ADMIN = (("DELETE", "/users/"), ("PUT", "/experiment"))  # method and beginning of the path
CALLERS = 10_000  # whose rates are known at once
BURST_S = 2.0  # so many seconds' requests may come at once


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much the service takes."""

    keys: Path | None = None  # file of `seqrec keys`; None = everybody may ask
    rate: float = 0.0  # requests a second of one key, or of one address where no key is asked for; 0 = any
    body: int = 8 << 20  # bytes
    queue: int = 1_000  # requests that wait for the model
    timeout_s: float = 30.0  # from the head of a request to the head of its answer


class Rates:
    """A token bucket for each caller; of those not seen for the longest time nothing is known any more."""

    def __init__(self, per_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self.now = per_second, now
        self.most = max(1.0, BURST_S * per_second)
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, caller: str) -> float:
        """Return 0 and count one request, or the seconds after which the next one may come."""
        now = self.now()
        tokens, seen = self.buckets.pop(caller, (self.most, now))
        tokens = min(self.most, tokens + (now - seen) * self.per_second)
        granted = tokens >= 1
        self.buckets[caller] = (tokens - granted, now)
        while len(self.buckets) > CALLERS:
            self.buckets.popitem(last=False)
        return 0.0 if granted else (1 - tokens) / self.per_second


class Guards:
    """ASGI middleware that refuses before anything of the body is read, and ends what takes too long."""

    def __init__(
        self, app: ASGIApp, limits: Limits, waiting: Callable[[], int], answered: Callable[[int], None]
    ) -> None:
        self.app, self.limits, self.waiting = app, limits, waiting
        self.answered = answered  # called with the HTTP status of each answer
        self.keys = Keys(limits.keys) if limits.keys else None
        self.rates = Rates(limits.rate) if limits.rate else None

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
            async with asyncio.timeout(self.limits.timeout_s):
                await (self._refusal(scope) or self.app)(scope, receive, sending)
        except TimeoutError:
            if started:
                raise
            await _refused(504, f"no answer within {self.limits.timeout_s:g} s")(scope, receive, sending)
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
        if self.rates is not None and (seconds := self.rates.wait(caller)):
            return _refused(429, f"more than {self.limits.rate:g} requests a second", _after(seconds))
        if scope["path"].startswith("/recommend") and self.waiting() >= self.limits.queue:
            return _refused(503, f"{self.limits.queue} requests are waiting already", _after(1))
        return None


def _refused(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": reason}, status, headers)


def _after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(math.ceil(seconds))}
