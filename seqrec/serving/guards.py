"""What a request passes before the service reads it: key, rate, size, queue and time.

Starlette limits a body whose size is not told in advance.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqrec.serving.batcher import NO_CHAMPION
from seqrec.serving.keys import Keys
from seqrec.serving.rates import retry_after
from seqrec.serving.service import Service

OPEN = ("/", "/health", "/ready", "/v2/health/live", "/v2/health/ready", "/metrics", "/openapi.json")  # no key, no rate
ASKING = ("/recommend", "/explain", "/similar", "/popular", "/items")  # they wait for the model, and so does /infer
OPEN_BELOW = ("/docs", "/redoc", "/static", "/page")
ADMIN = (("GET", "/users/"), ("DELETE", "/users/"), ("PUT", "/experiment"))  # method and beginning of the path
POLICY = "default-src 'none'; frame-ancestors 'none'"  # answers are data
PAGE = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"  # no script or style in the HTML
DOCS = ("/docs", "/redoc", "/docs/oauth2-redirect")  # pages of FastAPI, with scripts and styles in the HTML
BEARER = re.compile("^bearer +", re.IGNORECASE)  # case is free, by RFC 9110
SCRIPT = re.compile(rb"<script(?![^>]*src=)[^>]*>(.*?)</script>", re.DOTALL)


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

    def __init__(self, app: ASGIApp, service: Service, keys: Keys | None) -> None:
        self.app, self.service, self.keys = app, service, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN or scope["path"].startswith(OPEN_BELOW):
            await self.app(scope, receive, send)
            return
        count, timeout_s = self.service.metrics.count_response, self.service.options.timeout_s
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if not started:
                count(message["status"])
            started = True
            await send(message)

        try:
            async with asyncio.timeout(timeout_s):
                await (self._refusal(scope) or self.app)(scope, receive, sending)
        except TimeoutError:
            if started:
                raise
            await _refused(504, f"no answer within {timeout_s:g} s")(scope, receive, sending)
        except Exception:  # becomes a 500 further out
            if not started:
                count(500)
            raise

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """Return the answer to a request that may not pass; None for one that may."""
        service, path = self.service, scope["path"]
        caller = (scope.get("client") or ("",))[0]
        if self.keys is not None:
            key = self.keys.find(BEARER.sub("", Headers(scope=scope).get("authorization", "")))
            if key is None:
                return _refused(401, "send a valid key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
            if not key.admin and any(scope["method"] == m and path.startswith(p) for m, p in ADMIN):
                return _refused(403, "this key may not do that; use the key of an admin")
            caller = key.name
        scope.setdefault("state", {})["caller"] = caller
        if service.rates is not None and (seconds := service.rates.take(caller)):
            return _refused(429, f"more than {service.options.rate:g} requests per second", retry_after(seconds))
        if int(Headers(scope=scope).get("content-length", 0)) > service.options.max_body:
            return _refused(413, f"the body has more than {service.options.max_body} bytes: send less at once")
        if not service.served.ready:
            return _refused(503, NO_CHAMPION, retry_after(service.options.poll_s))
        asking = path.startswith(ASKING) or path.endswith("/infer")
        if asking and service.waiting() >= service.options.max_queue:
            return _refused(503, f"{service.options.max_queue} requests are waiting already", retry_after(1))
        return None


def _refused(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": reason}, status, headers)
