"""What every dialect of split engines answers. All of it is values in, values out: no clock, no socket, no chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.fleet.config import EngineConfig

Body = Mapping[str, Any]


class NoHandoff(ValueError):
    """A prefill engine answered without anything that a decode engine could go on from.

    ``faulty``: its operator must look; else the answer had ended with its first token. The text is a short word.
    """

    def __init__(self, cause: str, faulty: bool) -> None:
        super().__init__(cause)
        self.cause = cause
        self.faulty = faulty


@dataclass(frozen=True, slots=True)
class Side:
    """One engine of a pair. ``rank`` is the data-parallel one that serves the request, None where it has but one.

    ``engine_id`` is what that rank's KV is announced under, "" where the dialect needs none beforehand.
    """

    engine: EngineConfig
    rank: int | None = None
    engine_id: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """One request on its two engines. ``body`` is the client's; ``request_id`` is of this attempt and part alone.

    ``room`` is a random number below 2^62.
    """

    request_id: str
    path: str
    body: Body
    prefill: Side
    decode: Side
    room: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request to an engine, always POST."""

    path: str
    body: dict[str, Any]
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a prefill engine left behind. ``params`` go to the decode engine, where the dialect hands any over.

    ``cached_tokens`` of the prompt it had not to compute, None where it did not say; ``answer`` is all that it said.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    cached_tokens: int | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)


class Dialect(Protocol):
    """One way to split a request. Implementations hold no state."""

    concurrent: bool
    """Whether both legs are sent at once; else decode is asked with what prefill answered."""

    def whole(self, body: Body) -> str | None:
        """Why this request must not be split, as a short word; None where it may be."""

    def prefill(self, pair: Pair) -> Ask:
        """The prefill leg."""

    def handoff(self, pair: Pair, answer: Mapping[str, Any]) -> Handoff:
        """What the prefill engine's answer means. Raises NoHandoff."""

    def decode(self, pair: Pair, handoff: Handoff | None) -> Ask:
        """The decode leg; ``handoff`` is None where both are sent at once."""

    def let_go(self, pair: Pair, handoff: Handoff | None) -> tuple[tuple[Side, Ask], ...]:
        """What tells engines that nobody goes on with this request, beyond closed connections."""

    def join(self, body: Body, payload: dict[str, Any], handoff: Handoff, first: bool) -> None:
        """Put what only the prefill engine knows into a whole answer or a stream's event.

        ``first``: it is the whole answer, or a choice's first event.
        """
