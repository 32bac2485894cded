"""Requests to engines that nobody waits for: telling them to let go of what nobody will fetch."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gateway.dialects.leg import LegFailed, send
from gateway.dialects.protocol import Ask, Side
from gateway.upstream.pool import Pool

LETTING_GO_S = 2.0


class Errands:
    """Bounded in number, each with a deadline."""

    def __init__(self, pool: Pool, most: int = 256) -> None:
        self._pool = pool
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, request_id: str, asks: tuple[tuple[Side, Ask], ...]) -> None:
        """Send them; what comes of it changes nothing."""
        for side, ask in asks[: max(0, self._most - len(self._tasks))]:
            self._keep(self._send(request_id, side, ask))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, request_id: str, side: Side, ask: Ask) -> None:
        try:
            async with await send(self._pool, "let_go", side, ask, request_id, LETTING_GO_S):
                pass
        except LegFailed:
            return  # an engine that cannot be told frees by its own clock
