"""How a job ends: decided once, by whoever comes first, whatever else goes wrong afterwards.

A job of either end has one task for its work. A peer's Abort, the gateway's Cancel, a lost engine or the deadline end
that task through ``JobFate.end``; an exception inside it does so by itself. The job's owner then cleans up, in one
place and undisturbed: nothing here cancels the owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a job ended badly, as control.Failed says it. ``told``: the other side said so in an Abort, or is gone."""

    stage: str
    cause: str
    detail: str = ""
    told: bool = False


class JobEnded(Exception):
    """Raised inside a job's work to end it with this cause."""

    def __init__(self, cause: str, detail: str = "", stage: str | None = None) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail
        self.stage = stage


class JobFate:
    """The one ending of one job. ``stage`` is what the job is at; its work moves it on."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._ending: Ending | None = None
        self._over = False
        self._work: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """Whether the ending is decided: frames and events that come later change nothing."""
        return self._over

    @property
    def ending(self) -> Ending | None:
        """How it ended badly, once it did."""
        return self._ending

    def end(self, cause: str, detail: str = "", *, stage: str | None = None, told: bool = False) -> None:
        """End the job now. Only the first call counts; after the work has ended well, none does."""
        if self._over:
            return
        self._over = True
        self._ending = Ending(stage or self.stage, cause, detail, told)
        if self._work is not None:
            self._work.cancel()

    async def run(self, work: Coroutine[Any, Any, None], deadline: float) -> Ending | None:
        """Do the work until it ends, is ended, or ``deadline`` (loop time) comes; None means that it ended well.

        Returns only when the work's task is done.
        """
        if self._over:
            work.close()
            return self._ending
        self._work = asyncio.create_task(work)
        timer = asyncio.get_running_loop().call_at(deadline, self.end, "deadline", "the job's time is over")
        try:
            await asyncio.wait((self._work,))
        finally:
            timer.cancel()
            self._work.cancel()
        try:
            self._work.result()
        except JobEnded as ended:
            self.end(ended.cause, ended.detail, stage=ended.stage)
        except asyncio.CancelledError:
            self.end("cancelled")
        except Exception as error:
            log.exception("job failed stage=%s", self.stage)
            self.end("internal", f"{type(error).__name__}: {error}")
        self._over = True
        return self._ending
