"""The seam between one gateway and those that it acts as one with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.audit import AuditLog
from gateway.conversions import Conversions
from gateway.decisions import Decisions
from gateway.history import History
from gateway.leadership import Leadership
from gateway.shared.common import Common
from gateway.shared.slices import Slices
from gateway.shared.spending import Spending
from gateway.threshold import Threshold
from gateway.traffic import TrafficMeter
from scheduler.controller.observation import Spoken


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a gateway is kept the same on all of them.

    ``reload`` are called when what operators said has changed, ``keys_held`` once that cannot be taken back any more;
    ``siblings`` gets the others' URLs whenever these do. ``role_epoch`` is the newest that a node here has obeyed,
    ``common`` what this gateway must have in common with the others.
    """

    reload: Sequence[Callable[[], None]]
    keys_held: Callable[[], None]
    audit: AuditLog
    decisions: Decisions
    history: History
    conversions: Conversions
    threshold: Threshold
    meter: TrafficMeter
    siblings: Callable[[tuple[str, ...]], None]
    role_epoch: Callable[[], int]
    common: Callable[[], Common]


class Sharing(Protocol):
    """What a gateway asks of the others. ``id`` names this process as long as it lives."""

    @property
    def id(self) -> str: ...

    @property
    def gateways(self) -> int:
        """How many there are, as far as is known, this one among them."""

    @property
    def leadership(self) -> Leadership: ...

    @property
    def slices(self) -> Slices | None:
        """Who divides limits; None where they are this gateway's alone."""

    @property
    def spending(self) -> Spending | None:
        """Where budgets are counted; None where that is this gateway's state alone."""

    @property
    def trouble(self) -> str | None:
        """What is worse than it should be, though requests are served; None for nothing."""

    def start(self, url: str, parts: Parts) -> None:
        """Begin on the running loop; nodes reach this gateway at ``url``."""

    async def stop(self) -> None:
        """Take leave of the others. Idempotent."""

    def step_down(self) -> None:
        """Lead no more: this gateway only finishes what it has."""

    def writing(self) -> AbstractAsyncContextManager[None]:
        """What operators change inside is changed for all. Raises ApiError 503 where it cannot be."""

    def pass_on(self, lengths: Sequence[int], spoken: Sequence[Spoken]) -> None:
        """Traffic of a gateway that does not lead, for the one that does."""

    async def find_decision(self, name: str) -> dict[str, Any] | None:
        """Of another gateway; None where there is none, or nobody can be asked."""

    async def recent_decisions(self, limit: int) -> list[dict[str, Any]]:
        """The newest of all, newest first; none where nobody can be asked."""

    def view(self) -> dict[str, Any]:
        """For operators."""
