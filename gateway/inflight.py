"""Requests that are being answered, by whichever way, and whether more are taken."""

from __future__ import annotations

import asyncio

from gateway.errors import ApiError
from gateway.waiting import WaitingRoom


class InFlight:
    """Bounds how many there are, and says when none is left."""

    def __init__(self, most: int, waiting: WaitingRoom) -> None:
        self.count = 0
        self.leaving = False
        """Whether others should be asked from now on."""
        self.draining = False
        """Whether no more are taken."""
        self._most = most
        self._waiting = waiting
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A request is being answered from now on; ``leave`` follows."""
        self.count += 1
        self._idle.clear()

    def leave(self) -> None:
        """It is over."""
        self.count -= 1
        if not self.count:
            self._idle.set()

    def check(self) -> None:
        """Raise ApiError 503 where no more are taken, of which the one that asks is already counted."""
        if self.draining:
            raise ApiError(503, "this gateway is shutting down", code="shutting_down", retry_after_s=1)
        if self.count > self._most:
            text = f"this gateway serves {self._most} requests at once and does; try again later, or add a gateway"
            raise self._waiting.refused("in_flight", 503, text, 1.0, "overloaded")

    async def drained(self) -> None:
        """Return when no request is being answered."""
        await self._idle.wait()
