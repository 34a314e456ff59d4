"""How the service listens: binds before it announces, closes idle connections, and answers on while it drains."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import threading
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from seqrec.serving.service import Service

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:  # the faster one, where httptools is installed
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as Protocol

logger = logging.getLogger(__name__)
HEAD_S = 10.0  # seconds for the head of a request


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address, and does not listen yet.

    Raises:
        ValueError: the port is taken, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise taken(host, port, error) from error
    return listener


def taken(host: str, port: int, error: OSError, flags: str = "--host and --port") -> ValueError:
    """Return the error of an address that cannot be listened on."""
    return ValueError(f"cannot listen on host {host}, port {port}: {error.strerror or error}; change them with {flags}")


class HeadTimeout(Protocol):
    """Closes a connection that does not send the head of a request in time, from the start or after an answer.

    uvicorn itself only closes connections that are silent after an answer. Guards limit the time from the head on.
    """

    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time of the first head."""
        super().connection_made(transport)
        self._restart()

    def on_response_complete(self) -> None:
        """Start the time of the next head."""
        super().on_response_complete()
        self._restart()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        super().connection_lost(exc)
        if self.timer is not None:
            self.timer.cancel()

    def _restart(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.loop.call_later(HEAD_S, self._close_unless_answering)

    def _close_unless_answering(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """A server that answers on for some seconds after SIGTERM, until balancers have read /ready and send no more."""

    def __init__(self, api: FastAPI) -> None:
        """Take the application of `http.app`."""
        self.service: Service = api.state.service
        config = uvicorn.Config(
            api,
            http=HeadTimeout,
            ws="none",
            log_config=None,  # what uvicorn says is formatted as everything else
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(self.service.options.timeout_s),
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where.

        Raises:
            ValueError: another process has begun to listen at the address since it was bound.
        """
        for listener in sockets or ():
            try:
                listener.listen(self.config.backlog)
            except OSError as error:
                host, port, *_ = listener.getsockname()
                raise taken(host, port, error) from error
        await super().startup(sockets)
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        shown = f"[{host}]" if ":" in host else host
        logger.info("serving at http://%s:%d; open it in a browser to try the model", shown, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End: after the time to drain on the first SIGTERM, at once on a second one or on Ctrl-C."""
        if sig != signal.SIGTERM or self.service.draining or not self.service.options.drain_s:
            super().handle_exit(sig, frame)
            return
        self.service.draining = True
        timer = threading.Timer(self.service.options.drain_s, super().handle_exit, (sig, frame))
        timer.daemon = True
        timer.start()
