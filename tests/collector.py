"""A strict collector of traces: OTLP/HTTP in protobuf, on a real socket; what it is sent is parsed and kept."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class SeenSpan:
    """One span as the wire had it. Ids are hexadecimal, times nanoseconds."""

    service: str
    instance: str
    name: str
    trace: str
    span: str
    parent: str
    begin: int
    end: int
    failed: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]


class Collector:
    """Keeps spans; ``faults`` are requests that no exporter should have sent. ``answer`` is the status it gives."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[SeenSpan] = []
        self.faults: list[str] = []
        self.answer = 200
        self.raw = b""

    def trace(self, trace: str) -> list[SeenSpan]:
        """All spans of a trace, in the order of their beginnings."""
        return sorted((span for span in self.spans if span.trace == trace), key=lambda span: span.begin)

    def take(self, path: str, kind: str, data: bytes) -> None:
        """One export."""
        if (path, kind) != ("/v1/traces", "application/x-protobuf"):
            self.faults.append(f"{path} {kind}")
            return
        self.raw += data
        request = ExportTraceServiceRequest.FromString(data)
        for resource in request.resource_spans:
            about = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                for one in scope.spans:
                    self.spans.append(
                        SeenSpan(
                            about["service.name"],
                            about["service.instance.id"],
                            one.name,
                            one.trace_id.hex(),
                            one.span_id.hex(),
                            one.parent_span_id.hex(),
                            one.start_time_unix_nano,
                            one.end_time_unix_nano,
                            one.status.code == 2,
                            {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in one.attributes},
                            tuple(event.name for event in one.events),
                        )
                    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens on a free port until the block ends."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if collector.answer == 200:
                collector.take(self.path, self.headers["content-type"], data)
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.answer)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
