"""The tracer of a process: to a collector where one is named, else one that costs nothing."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvcache.tracing import NO_TRACER, Tracer


def tracer_for(endpoint: str | None, service: str, instance: str) -> Tracer:
    """To the collector at this base URL; none without one. Raises ValueError naming the cure."""
    if endpoint is None:
        return NO_TRACER
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{endpoint!r} is not the base URL of an OTLP/HTTP collector, as http://127.0.0.1:4318 is")
    try:
        from kvcache.otlp import OtlpTracer
    except ImportError as error:
        raise ValueError(f"traces need more packages ({error}): pip install 'prfaas[traces]'") from error
    return OtlpTracer(endpoint, service, instance)
