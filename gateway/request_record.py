"""What is kept of one request while it lives, and as its decision record afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from gateway.attempts import Attempt
from gateway.building import Prompted
from kvcache.control import AnswerPart, Delta, Finished
from scheduler.decision import Decision, Option
from scheduler.replay import SCHEMA
from scheduler.values import PolicyValues


@dataclass(frozen=True, slots=True)
class Route:
    """What the response headers say. ``codec`` is ``none`` where no KV was sent."""

    route: str
    reason: str
    prefill: str
    codec: str


class Try(Protocol):
    """One attempt at a request, whatever serves it."""

    @property
    def number(self) -> int:
        """The first is 1."""

    @property
    def option(self) -> Option:
        """The way that was chosen."""

    @property
    def leg(self) -> object | None:
        """What prefills apart from decode, None where nothing does."""

    @property
    def codec(self) -> str | None:
        """What the KV came by, once it has."""

    def record(self) -> dict[str, Any]:
        """As a decision record keeps it."""


A = TypeVar("A", bound=Try)


class Recorded(Generic[A]):
    """Filled by the request's life as things happen. Times are of the event loop's clock, but for ``at``."""

    def __init__(self, prompted: Prompted, began: float) -> None:
        self._p = prompted
        self.began = began
        self.at = time.time()
        self.attempts: list[A] = []
        self.decisions: list[Decision] = []
        self.first_ways = 1
        """How many of the decisions were no fallbacks."""
        self._route: tuple[tuple[int, str | None], Route] | None = None
        self.first_at: float | None = None
        self.finished: Finished | None = None
        self.spoken: int | None = None
        """Tokens of the answer that came so far; None before the first."""

    @property
    def route(self) -> Route:
        """The way that the last attempt took."""
        attempt = self.attempts[-1]
        if self._route is not None and self._route[0] == (attempt.number, attempt.codec):
            return self._route[1]
        decision = self.decisions[attempt.number - 1]  # a later one may have been refused
        name = f"remote:{attempt.option.cluster}" if decision.remote else "local"
        prefill = "in-place" if attempt.leg is None else "node"
        route = Route(name, decision.reason.value, prefill, attempt.codec or "none")
        self._route = (attempt.number, attempt.codec), route
        return route

    def decided(self, decision: Decision, last: bool) -> None:
        """A decision; ``last`` where it is a fallback's."""
        self.decisions.append(decision)
        if not last:
            self.first_ways = len(self.decisions)

    def saw(self, item: AnswerPart) -> None:
        """A piece of the answer."""
        if isinstance(item, Delta):
            self.spoken = (self.spoken or 0) + len(item.token_ids)
        elif isinstance(item, Finished):
            self.finished = item
            self.spoken = item.completion_tokens

    def kept(self, outcome: str, values: PolicyValues, queue_s: float, now: float) -> dict[str, Any]:
        """The record as it is kept; decisions are still what they were when they were made."""
        decisions, ways, done = self.decisions, self.first_ways, self.finished
        return {
            "schema": SCHEMA,
            "id": self._p.facts.request_id,
            "request_id": self._p.request_id,
            "at": self.at,
            "endpoint": self._p.endpoint,
            "measures": self._p.measures,
            "policy": values,
            "decision": decisions[0] if decisions else None,
            "retried": decisions[1:ways],
            "fallback_decision": decisions[ways] if len(decisions) > ways else None,
            "fallback_retried": decisions[ways + 1 :],
            "attempts": [attempt.record() for attempt in self.attempts],
            "route": self.route.route if self.attempts else None,
            "fallback": len(self.attempts) > ways,
            "outcome": outcome,
            "ttft_s": None if self.first_at is None else self.first_at - self.began,
            "queue_s": queue_s,
            "tokens_per_s": self._tokens_per_s(now),
            "usage": None if done is None else _usage(done),
            "finish": None if done is None else done.reason,
        }

    def _tokens_per_s(self, now: float) -> float | None:
        done = self.finished
        if done is None or self.first_at is None or done.completion_tokens < 2 or now <= self.first_at:
            return None
        return (done.completion_tokens - 1) / (now - self.first_at)


class RequestRecord(Recorded[Attempt]):
    """Of a request to our own nodes."""


def _usage(done: Finished) -> dict[str, int]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "cached_tokens": done.cached_tokens,
    }
