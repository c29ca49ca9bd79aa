"""A span per request, by OpenTelemetry (``fairlane[tracing]``), to a collector that speaks OTLP over HTTP.

Spans are made on the event loop and handed to the SDK's batch processor: a bounded queue and a thread that encodes and
sends. A collector that is slow or away costs spans, never requests. Nothing happens per token. The variables that begin
with ``OTEL_`` are the SDK's own and mean what its documentation says (endpoint, headers, sampler, batch limits).

Attributes follow OpenTelemetry's conventions for generative AI; prompts and answers are never among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from router_ext import __version__
from router_ext.obs.tracing import Trace, Value, read_parent

SERVICE = "fairlane-router"

FLUSH_S = 3.0
"""How long the end of the process waits for the collector."""


class SpanTrace(Trace):
    """A request that is recorded."""

    __slots__ = ("_is_ended", "_span")

    is_recording = True

    def __init__(self, span: Span, state: str) -> None:
        context = span.get_span_context()
        super().__init__(f"{context.trace_id:032x}", f"{context.span_id:016x}", int(context.trace_flags), state)
        self._span = span
        self._is_ended = False

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        self._span.add_event(name, attributes)

    def end(self, attributes: Mapping[str, Value | list[str]], *, name: str | None = None, error: str | None) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        span = self._span
        if name is not None:
            span.update_name(name)
        span.set_attributes(attributes)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end()


class Recording:
    """Implements ``Tracing``. Cost per request: some 30 us, and as much again in the processor's thread."""

    def __init__(self, *, router: str, endpoint: str) -> None:
        resource = Resource.create({"service.version": __version__, "service.instance.id": router})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            # Neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES names it.
            resource = resource.merge(Resource({"service.name": SERVICE}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("fairlane", __version__)

    def begin(self, headers: Iterable[tuple[bytes, bytes]], *, path: str, arrived_us: int) -> Trace:
        parent = read_parent(headers)
        context: Any = None
        if parent is not None:
            remote = SpanContext(
                trace_id=int(parent.trace_id, 16),
                span_id=int(parent.span_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(parent.flags),
                trace_state=TraceState.from_header([parent.state]) if parent.state else None,
            )
            context = set_span_in_context(NonRecordingSpan(remote))
        span = self._tracer.start_span(
            f"POST {path}",
            context=context,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": path},
            start_time=arrived_us * 1_000,
        )
        return SpanTrace(span, "" if parent is None else parent.state)

    async def close(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop did not wait so long
                loop.call_soon_threadsafe(ended.set)

        # The SDK would wait half a minute for a collector that is away; a thread of the executor would hold the exit.
        threading.Thread(target=end, name="tracing end", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await ended.wait()
