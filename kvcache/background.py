"""Work that goes on in the background, which nobody awaits: if it breaks, the log says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any


def in_background(work: Coroutine[Any, Any, None], log: logging.Logger, broken: str) -> asyncio.Task[None]:
    """Begin it; ``broken`` is what is lost with it. There must be a running loop."""

    def say(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error(broken, exc_info=task.exception())

    task = asyncio.create_task(work)
    task.add_done_callback(say)
    return task
