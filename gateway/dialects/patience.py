"""A deadline that is asked again when it is reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

ASK_AGAIN_S = 0.01
"""Before something counts as late it is looked whether it still does."""


@asynccontextmanager
async def patience(ends: Callable[[], float]) -> AsyncIterator[None]:
    """Raise TimeoutError once it is as late as ``ends`` says, which is asked again by then."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout_at(ends()) as limit:
        timer: asyncio.TimerHandle

        def arm() -> None:
            nonlocal timer
            timer = loop.call_at((limit.when() or 0.0) - ASK_AGAIN_S, look)

        def look() -> None:
            later = ends()
            if later > (limit.when() or 0.0):
                limit.reschedule(later)
                arm()

        arm()
        try:
            yield
        finally:
            timer.cancel()
