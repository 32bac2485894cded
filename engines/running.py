"""One job on an engine, from its start to the moment when the engine touches nothing of it any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engines.protocol import (
    Engine,
    EngineLost,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobEvent,
    JobFailed,
    PrefillCommand,
    PrefillFinished,
    StoreCommand,
)

log = logging.getLogger(__name__)

Terminal = PrefillFinished | GenerationFinished | JobCancelled | JobFailed


class EngineRun:
    """Hands a job's events to ``on_event`` as they come. The job's pages may be freed once ``stop`` has returned."""

    def __init__(
        self, engine: Engine, command: PrefillCommand | GenerateCommand, on_event: Callable[[JobEvent], None]
    ) -> None:
        """Starts the job. Raises ValueError where the engine still runs one of that name."""
        self._engine = engine
        self._job = command.job
        self._on_event = on_event
        self._stream = engine.submit(command)
        self._reading = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        """Whether the engine is done with the job."""
        return self._reading.done()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from the event loop once the engine is done with the job, or lost."""
        self._reading.add_done_callback(lambda _: callback())

    async def wait(self) -> Terminal:
        """The job's last event. Raises EngineLost, and whatever ``on_event`` raised. Cancelling it stops nothing."""
        return await asyncio.shield(self._reading)

    def store(self, command: StoreCommand) -> None:
        """Answer an offer of the job. Nothing happens where the job is over."""
        self._engine.store(command)

    def finish(self) -> None:
        """End a generation as an end token would: its last events still come."""
        self._engine.finish(self._job)

    async def stop(self, patience_s: float) -> Terminal | None:
        """Cancel the job if it still runs and wait for its end; None where the engine was lost over it.

        An engine that does not let go within ``patience_s`` is ended: its pages could never be freed otherwise.
        """
        if not self._reading.done():
            await self._engine.cancel(self._job)
            await asyncio.wait((self._reading,), timeout=patience_s)
        if not self._reading.done():
            log.error("engine keeps a cancelled job job=%s patience=%.0fs: ending the engine", self._job, patience_s)
            await self._engine.close()
            await asyncio.wait((self._reading,))
        try:
            return self._reading.result()
        except Exception:
            return None

    async def _read(self) -> Terminal:
        failure: Exception | None = None
        last: JobEvent | None = None
        try:
            async for event in self._stream:
                last = event
                if failure is None:
                    try:
                        self._on_event(event)
                    except Exception as error:
                        failure = error
                        await self._engine.cancel(self._job)
        finally:
            await self._stream.aclose()
        if failure is not None:
            raise failure
        if not isinstance(last, Terminal):
            raise EngineLost("the job's stream ended without a terminal event")
        return last
