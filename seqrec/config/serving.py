"""Section `serve`: the options of the service, which are also flags of `python -m seqrec serve`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from seqrec.config.checks import Section, require
from seqrec.config.ranges import Bounds

DAY_S = 86_400
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")  # of a page: no path, and no slash at the end
SLOWEST = 0.001  # requests a second: 1 in a quarter of an hour


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Section):
    """Section `serve`: the model, the address, and limits of the service; a flag of the same name takes precedence."""

    saved: str = ""  # model to serve instead of the champion: a folder with its weights and card, or models:/NAME/N
    ann: Annotated[int, Bounds(ge=0, le=100_000)] = 0  # candidates of the approximate search; 0: score all items
    items: str = ""  # path or address (s3://, gs://, az://) of the table of items; rules may then name its attributes
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0: all
    port: Annotated[int, Bounds(ge=0, le=65_535)] = 8000  # port to listen on; 0: any free one
    metrics_port: Annotated[int, Bounds(ge=0, le=65_535)] = 0  # port for /metrics only, turns /docs off; 0: `port`
    poll_s: Annotated[float, Bounds(ge=0, le=DAY_S)] = 30.0  # seconds between checks for a new champion; 0: never
    threads: Annotated[int, Bounds(ge=1, le=1_024)] = 1  # CPU threads of each pass of the model
    keys: str = ""  # file of `seqrec keys`; requests must then carry a key
    rate: Annotated[float, Bounds(ge=0, le=1e6)] = (
        0.0  # requests per second and key or address, weighted by cost; 429 above it; 0: no limit
    )
    max_cost: Annotated[float, Bounds(gt=0, le=1e6)] = 200.0  # maximum cost of a request; 413 above it
    max_body: Annotated[int, Bounds(ge=1, le=1 << 30)] = 8 << 20  # maximum bytes of a request's body; 413 above it
    max_queue: Annotated[int, Bounds(ge=1, le=1_000_000)] = (
        1_000  # maximum number of requests that wait for the model; 503 above it
    )
    timeout_s: Annotated[float, Bounds(gt=0, le=3_600)] = 30.0  # seconds until an unanswered request gets 504
    drain_s: Annotated[float, Bounds(ge=0, le=3_600)] = 5.0  # seconds to keep answering after SIGTERM; /ready is 503
    origins: str = ""  # web pages of other origins that may call the service, separated by commas
    store: str = ""  # SQLAlchemy URL of the event store, such as sqlite:///events.db; default: SEQREC_STORE
    keep_days: Annotated[float, Bounds(ge=0, le=36_500)] = 0.0  # days until stored events are deleted; 0: never
    candidate: str = ""  # second model that answers some of the users: a folder, models:/NAME/N or models:/NAME@ALIAS
    share: Annotated[float, Bounds(ge=0, le=1)] = 0.1  # share of the users whom the candidate answers
    log_format: Literal["text", "json"] = "text"  # text, or json: one line of JSON for each message and each request

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.metrics_port or self.metrics_port != self.port, "metrics_port must differ from port")
        for origin in map(str.strip, self.origins.split(",") if self.origins else ()):
            require(bool(ORIGIN.fullmatch(origin)), f"origins: {origin!r:.80} is not one, such as https://shop.example")
        require(self.host != "", "host must not be empty; 0.0.0.0 listens on all addresses")
        require(not 0 < self.rate < SLOWEST, f"rate must be 0 or at least {SLOWEST}, not {self.rate!r}")
