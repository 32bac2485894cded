"""Keeps one engine alive: the jobs of a lost one have failed by themselves, the next one starts after a pause."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engines.protocol import Engine, EngineLost
from node.backoff import Backoff

log = logging.getLogger(__name__)

STEADY_S = 60.0
"""An engine that lived this long was no failed start: the next pause is short again."""


class EngineKeeper:
    """``engine`` is the one that runs, None while there is none; ``on_change`` is called after every change."""

    def __init__(
        self, start: Callable[[], Awaitable[Engine]], on_change: Callable[[], None], backoff: Backoff | None = None
    ) -> None:
        self.engine: Engine | None = None
        self.detail = ""
        """Why there is no engine; "" while there is one."""
        self._start = start
        self._on_change = on_change
        self._backoff = backoff or Backoff(0.5, 30.0)

    async def start(self) -> Engine:
        """Start the first engine. Raises EngineLost: a model that never ran is a mistake, not a mishap."""
        self.engine = await self._start()
        return self.engine

    async def run(self) -> None:
        """Replace every engine that is lost, until cancelled."""
        loop = asyncio.get_running_loop()
        while self.engine is not None:
            begun = loop.time()
            cause = await self.engine.wait_lost()
            log.error("engine lost cause=%r", cause)
            self.engine = None
            self._changed(f"engine lost: {cause}")
            if loop.time() - begun > STEADY_S:
                self._backoff.reset()
            await self._replace()

    async def close(self) -> None:
        """End the engine. Idempotent."""
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()

    async def _replace(self) -> None:
        while self.engine is None:
            await asyncio.sleep(self._backoff.next_delay())
            try:
                self.engine = await self._start()
            except EngineLost as lost:
                log.error("engine did not start cause=%r", str(lost))
                self._changed(f"engine does not start: {lost}")
        log.info("engine runs again")
        self._changed("")

    def _changed(self, detail: str) -> None:
        self.detail = detail[:500]
        self._on_change()
