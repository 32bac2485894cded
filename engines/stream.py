"""One job's events on the node's side, between the engine's pace and the reader's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engines.protocol import (
    EngineLost,
    Exported,
    GenerationFinished,
    JobCancelled,
    JobEvent,
    JobFailed,
    PrefillFinished,
)

BACKLOG_BYTES = 64 << 20
TERMINAL = (PrefillFinished, GenerationFinished, JobCancelled, JobFailed)


class ProcessStream:
    """One job's events as they come. A reader that falls 64 MiB behind loses its job, not its engine's time."""

    def __init__(self, job: str, cancel: Callable[[str], None]) -> None:
        self._job = job
        self._cancel = cancel
        self._events: deque[tuple[JobEvent, int]] = deque()
        self._backlog = 0
        self._overflowed = False
        self._ended = False
        self._lost: str | None = None
        self._wake = asyncio.Event()

    def __aiter__(self) -> ProcessStream:
        return self

    async def __anext__(self) -> JobEvent:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            if self._lost is not None:
                raise EngineLost(self._lost)
            self._wake.clear()
            await self._wake.wait()
        event, size = self._events.popleft()
        self._backlog -= size
        return event

    async def aclose(self) -> None:
        """Cancel the job if it still runs; returns once the engine touches nothing of it, or is dead."""
        if not self._ended and self._lost is None:
            self._cancel(self._job)
        while not self._ended and self._lost is None:
            self._wake.clear()
            await self._wake.wait()
        self._events.clear()

    def deliver(self, event: JobEvent, size: int) -> None:
        """Take in one event of ``size`` encoded bytes."""
        self._ended = isinstance(event, TERMINAL)
        if self._overflowed:
            if self._ended:
                detail = f"its reader fell {BACKLOG_BYTES} bytes behind"
                self._events.append((JobFailed(self._job, "slow_reader", detail), 0))
        elif isinstance(event, Exported) and self._events and isinstance(self._events[-1][0], Exported):
            self._events[-1] = (event, self._events[-1][1])
        else:
            self._events.append((event, size))
            self._backlog += size
            if self._backlog > BACKLOG_BYTES and not self._ended:
                self._overflowed = True
                self._events.clear()
                self._cancel(self._job)
        self._wake.set()

    def lose(self, cause: str) -> None:
        """No more events will come: the engine is dead."""
        self._lost = cause
        self._wake.set()
