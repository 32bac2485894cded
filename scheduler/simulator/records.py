"""What came of each request, by its place in the traffic. Times are seconds; nan where it has not happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan


@dataclass(slots=True)
class Converted:
    """One role change: when it was asked for, when the machine was empty, and when it served again."""

    node: str
    to: str
    asked_at: float
    drained_at: float = nan
    served_at: float = nan


class Records:
    """Plain lists, one entry a request; what a run writes down and figures are made of.

    ``egress`` are the bytes that had left all remote clusters where what is counted begins, and where it ends.
    """

    def __init__(self, requests: int) -> None:
        self.first_at = [nan] * requests
        self.done_at = [nan] * requests
        self.remote = bytearray(requests)
        self.wire_bytes = [0.0] * requests
        self.cached_tokens = [0] * requests
        self.egress = [0.0, 0.0]
        self.fell_back = 0
        self.failed = 0
        self.conversions: list[Converted] = []


@dataclass(slots=True)
class Span:
    """A stretch of one request's way on one machine or link, for a timeline."""

    track: str
    name: str
    begin_s: float
    end_s: float
    request: int


@dataclass(slots=True)
class Spans:
    """Up to ``most`` spans, of the first requests; a timeline of everything would open in no viewer."""

    most: int = 50_000
    kept: list[Span] = field(default_factory=list)

    def add(self, track: str, name: str, begin_s: float, end_s: float, request: int) -> None:
        """Keep one, if there is room."""
        if len(self.kept) < self.most:
            self.kept.append(Span(track, name, begin_s, end_s, request))
