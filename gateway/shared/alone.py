"""A gateway that shares with nobody: all that it keeps is in memory and in its SQLite file."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gateway.leadership import SoleGateway
from gateway.shared.sharing import Parts
from gateway.state import State
from scheduler.controller.observation import Spoken


class Alone:
    """``Sharing`` without others."""

    gateways = 1
    slices = None
    spending = None
    trouble = None

    def __init__(self, state: State) -> None:
        self.id = secrets.token_hex(8)
        self.leadership = SoleGateway(state)

    def start(self, url: str, parts: Parts) -> None:
        """Nothing begins."""

    async def stop(self) -> None:
        """Nothing ends."""

    def step_down(self) -> None:
        """There is nobody else; whoever comes next finds the state."""

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """The state is all there is."""
        yield

    def pass_on(self, lengths: Sequence[int], spoken: Sequence[Spoken]) -> None:
        """It leads itself."""

    async def find_decision(self, name: str) -> dict[str, Any] | None:
        """There is nobody to ask."""
        return None

    async def recent_decisions(self, limit: int) -> list[dict[str, Any]]:
        """There is nobody to ask."""
        return []

    def view(self) -> dict[str, Any]:
        """It is the only one, and leads."""
        return {"gateway": self.id, "leads": True, "gateways": [], "redis": None}
