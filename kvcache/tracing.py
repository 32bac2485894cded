"""Traces of requests over all processes that work for them: what a span is here, and the ones that cost nothing.

A context travels as a W3C ``traceparent`` in orders; "" is none. Nothing of a prompt or an answer goes into a span.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Attributes = Mapping[str, str | int | float | bool]
NONE: Attributes = {}
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", re.ASCII)
MOST_CHARS = 256


class Span(Protocol):
    """A stretch of work. All calls return at once, whatever becomes of the span."""

    @property
    def traceparent(self) -> str:
        """What work elsewhere names as its parent; "" where nothing is traced."""

    def child(self, name: str, attributes: Attributes = NONE) -> Span:
        """A part of it that begins now."""

    def note(self, attributes: Attributes) -> None:
        """What has become known of it."""

    def happened(self, name: str) -> None:
        """A moment in it."""

    def end(self, failure: str = "") -> None:
        """It is over; ``failure`` is a short word for what went wrong. Idempotent."""


class Tracer(Protocol):
    """Where spans begin."""

    def serve(self, name: str, traceparent: str) -> Span:
        """A request from outside, in its caller's trace where it named a valid one, else in one of its own."""

    def join(self, name: str, traceparent: str) -> Span:
        """Work for a request that is traced elsewhere; without a context it is not traced."""

    def close(self) -> None:
        """Hand on what is left, within a few seconds. Idempotent."""


class NoSpan:
    """Of what is not traced."""

    traceparent = ""

    def child(self, name: str, attributes: Attributes = NONE) -> Span:
        """Itself."""
        return self

    def note(self, attributes: Attributes) -> None:
        """Nothing."""

    def happened(self, name: str) -> None:
        """Nothing."""

    def end(self, failure: str = "") -> None:
        """Nothing."""


NO_SPAN = NoSpan()


class NoTracer:
    """Of a process that traces nothing."""

    def serve(self, name: str, traceparent: str) -> Span:
        """No span."""
        return NO_SPAN

    def join(self, name: str, traceparent: str) -> Span:
        """No span."""
        return NO_SPAN

    def close(self) -> None:
        """Nothing."""


NO_TRACER = NoTracer()


class _Part:
    """Around a part of a span."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        """It has begun."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._span.end("" if kind is None else kind.__name__)


_NO_PART = nullcontext()


def part(span: Span, name: str) -> AbstractContextManager[None]:
    """A part of a span that ends with the block; what is raised there is its failure, by name."""
    return _NO_PART if span is NO_SPAN else _Part(span.child(name))


def valid_traceparent(text: str) -> bool:
    """Whether this names a trace and a span, as https://www.w3.org/TR/trace-context/ wants them written."""
    if len(text) > MOST_CHARS or not _TRACEPARENT.fullmatch(text):
        return False
    return len(text) == 55 or text[:2] != "00"
