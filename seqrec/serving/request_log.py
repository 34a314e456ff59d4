"""Logs as JSON: a line for each message and each request, for programs that gather logs. No line holds a history."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqrec import redaction

logger = logging.getLogger(__name__)
HEADER = "X-Request-ID"
NAME = re.compile(r"[\w.:-]{1,100}", re.ASCII)  # of a request, as a caller may give it


class JSONFormatter(redaction.Formatter):
    """Writes a message and its `fields` as one line of JSON without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of `record`."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redaction.redacted(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = redaction.redacted(self.formatException(record.exc_info))
        return json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False)


class RequestLog:
    """ASGI middleware: a line for each request, and its id in the answer.

    A line names the route, such as /users/{user}, never the path, query, body or key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and write its line when it has been answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if NAME.fullmatch(given) else uuid.uuid4().hex
        status, began = 500, time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            fields = {
                "request_id": name,
                "method": scope["method"],
                "route": _route(scope),
                "status": status,
                "milliseconds": round(1000 * (time.perf_counter() - began), 2),
                "version": scope.get("state", {}).get("version", ""),
            }
            logger.info("request", extra={"fields": fields})


def _route(scope: Scope) -> str:
    """Return the path of the route of a request, also of one that was refused before it came there; empty: none."""
    route = scope.get("route")
    if route is None and "app" in scope:
        route = next((one for one in scope["app"].routes if one.matches(scope)[0] == Match.FULL), None)
    return getattr(route, "path", "")


def write_json() -> None:
    """Write all messages of this process as JSON from now on."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JSONFormatter())
