"""What is asked of split engines, and what all such requests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.dialects.parts import Part
from gateway.dialects.protocol import Dialect
from gateway.fleet.attempt import Calls
from gateway.fleet.config import DialectName
from gateway.fleet.facts import Terms
from gateway.fleet.health import HealthWatch
from gateway.services import Services


@dataclass(frozen=True, slots=True)
class Splits:
    """What all requests of one dialect share. ``services`` has a queue and a policy of their own."""

    services: Services
    calls: Calls
    health: HealthWatch
    terms: Callable[[str, str], Terms]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its model and dialect, what is asked for in which parts, and what its client wrote.

    ``whole`` says why it must not be split, None where it may be.
    """

    model: str
    name: DialectName
    dialect: Dialect
    parts: tuple[Part, ...]
    body: Mapping[str, Any]
    whole: str | None = None

    @property
    def streams(self) -> bool:
        """Whether the client wants the answer as it is spoken."""
        return self.body.get("stream") is True


class EngineRefused(Exception):
    """An engine says that the request is wrong; its own words go to the client."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"http_{status}")
        self.status = status
        self.body = body
