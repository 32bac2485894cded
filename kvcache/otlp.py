"""Traces by OpenTelemetry's SDK to a collector over OTLP/HTTP, from a thread of its own.

What the collector does not take is lost: spans wait in a bounded queue, and nobody waits for them.
"""

from __future__ import annotations

import threading
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvcache.tracing import MOST_CHARS, NO_SPAN, NONE, Attributes, Span, valid_traceparent

QUEUE = 2048
DELAY_MS = 1000
EXPORT_S = 5.0
CLOSE_S = 3.0


class OtlpSpan:
    """One span of the SDK."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        """Of this span."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(self, name: str, attributes: Attributes = NONE) -> Span:
        """A part that begins now."""
        inside = trace.set_span_in_context(self._span)
        return OtlpSpan(self._tracer, self._tracer.start_span(name, inside, attributes=_short(attributes)))

    def note(self, attributes: Attributes) -> None:
        """Set attributes."""
        self._span.set_attributes(_short(attributes))

    def happened(self, name: str) -> None:
        """Add an event."""
        self._span.add_event(name)

    def end(self, failure: str = "") -> None:
        """End it, once."""
        if not self._span.is_recording():
            return
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure[:MOST_CHARS]))
        self._span.end()


class OtlpTracer:
    """``service`` names the kind of process, ``instance`` the one; ``endpoint`` is the collector's base URL."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, QUEUE, DELAY_MS))
        self._tracer = self._provider.get_tracer("prfaas")
        self._propagator = TraceContextTextMapPropagator()
        self._closed = False

    def serve(self, name: str, traceparent: str) -> Span:
        """In the caller's trace, or a new one."""
        return self._begin(name, traceparent if valid_traceparent(traceparent) else "", SpanKind.SERVER)

    def join(self, name: str, traceparent: str) -> Span:
        """In the trace of who gave the order."""
        if not valid_traceparent(traceparent):
            return NO_SPAN
        return self._begin(name, traceparent, SpanKind.CONSUMER)

    def close(self) -> None:
        """Export what is left. A collector that does not answer is not waited for."""
        if self._closed:
            return
        self._closed = True
        ending = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    def _begin(self, name: str, traceparent: str, kind: SpanKind) -> Span:
        outside = self._propagator.extract({"traceparent": traceparent}) if traceparent else None
        span = self._tracer.start_span(name, outside, kind)
        return OtlpSpan(self._tracer, span) if span.is_recording() else NO_SPAN


def _short(attributes: Attributes) -> dict[str, Any]:
    return {name: value[:MOST_CHARS] if isinstance(value, str) else value for name, value in attributes.items()}
