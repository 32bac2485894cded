"""A bell for one who waits, mostly until the same time: one timer serves however many waits."""

from __future__ import annotations

import asyncio

SLACK_S = 0.001
"""Two times that are no further apart are the same; they are computed from the clock anew each time."""


class Bell:
    """A streamed answer waits at it once a token, so no wait may cost a timer of its own."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def ring(self) -> None:
        """Wake whoever waits now; a ring that nobody waits for is not kept."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, due: float) -> None:
        """Return when it rings. Raises TimeoutError at ``due``, the event loop's time. One may wait at a time."""
        assert self._waiter is None
        loop = asyncio.get_running_loop()
        if self._timer is None or abs(due - self._due) > SLACK_S:
            self.close()
            self._due, self._timer = due, loop.call_at(due, self._late)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Let go of the timer. Idempotent; another wait makes another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())
