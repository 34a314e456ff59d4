"""Traces by OpenTelemetry, where the environment names a collector; the libraries are the extra `otel`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from seqrec.config import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PATHS = ("(/v2)?/health(/live|/ready)?$", "/ready$", "/metrics$", "/docs", "/redoc", "/static", "/page/")
UNTRACED = ",".join(f"^[a-z]+://[^/]+{path}" for path in PATHS)  # from the start: an id in a path may end alike
ADDRESSES = ("http.target", "http.url", "url.path", "url.query", "url.full")  # hold users, items and histories


def wanted() -> bool:
    """Return whether the environment names a collector."""
    return any(os.environ.get(name) for name in VARIABLES)


def trace(api: FastAPI, processor: SpanProcessor | None = None) -> None:
    """Give each request a span, which carries on the caller's trace; no attribute holds a path, query or body.

    OpenTelemetry's variables decide where spans are sent, and how many: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME,
    OTEL_TRACES_SAMPLER and so on. Without a `processor`, spans go to the collector named by the environment.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{VARIABLES[1]}: {error.name} is not installed; install .[otel] or unset the variable"
        ) from error
    service = os.environ.get("OTEL_SERVICE_NAME", "seqrec")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}))
    provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
    FastAPIInstrumentor.instrument_app(
        api,
        tracer_provider=provider,
        excluded_urls=UNTRACED,
        exclude_spans=["receive", "send"],
        server_request_hook=_without_address,
    )


def _without_address(span: Span, _: dict[str, Any]) -> None:
    for name in ADDRESSES:
        if name in getattr(span, "attributes", {}):
            span.set_attribute(name, "")
