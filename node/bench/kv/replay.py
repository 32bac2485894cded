"""An engine without a model: it exports a recording, and takes what is loaded without saying a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

from engines.protocol import (
    EngineInfo,
    Exported,
    GenerateCommand,
    GenerationFinished,
    JobEvent,
    JobStream,
    Loaded,
    PrefillCommand,
    PrefillFinished,
    StoreCommand,
)
from kvcache.blocks import PageGeometry
from kvcache.hostpool import HostPool
from kvcache.plan import plan_transfer
from node.bench.kv.recording import CHUNK_TOKENS, Recording


class ReplayEngine:
    """Implements ``engines.protocol.Engine``; without a recording it can only load.

    A recording stays in the pages that it was laid into: a job that is given the same ones finds it there. A copy of
    the whole cache through this process would be measured otherwise, and no engine makes one.
    """

    def __init__(self, geometry: PageGeometry, pool: HostPool, recording: Recording | None) -> None:
        self._geometry = geometry
        self._pool = pool
        self._recording = recording
        self._laid: dict[int, tuple[int, int]] = {}
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def info(self) -> EngineInfo:
        """No model, no speeds."""
        return EngineInfo("replay", "", 0, 0, CHUNK_TOKENS, 0.0, 0.0)

    def submit(self, command: PrefillCommand | GenerateCommand) -> JobStream:
        """Start a job."""
        events = self._export(command) if isinstance(command, PrefillCommand) else self._load(command)
        return cast(JobStream, events)

    def store(self, command: StoreCommand) -> None:
        """Nothing is ever offered."""

    def finish(self, job: str) -> None:
        """Every job ends by itself at once."""

    async def cancel(self, job: str) -> None:
        """Every job ends by itself at once."""

    async def wait_lost(self) -> str:
        """Never, before ``close``."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Nothing runs. Idempotent."""
        if not self._lost.done():
            self._lost.set_result("closed")

    async def _export(self, command: PrefillCommand) -> AsyncIterator[JobEvent]:
        began = asyncio.get_running_loop().time()
        pieces = await asyncio.to_thread(self._lay, command.start, command.stop, command.pages)
        yield Exported(command.job, pieces)
        yield PrefillFinished(command.job, asyncio.get_running_loop().time() - began)

    async def _load(self, command: GenerateCommand) -> AsyncIterator[JobEvent]:
        yield Loaded(command.job)
        yield GenerationFinished(command.job, "length")

    def _lay(self, start: int, stop: int, pages: Sequence[int]) -> int:
        """Lay the recording into ``pages`` where it does not lie there yet; returns the number of pieces."""
        assert self._recording is not None
        plan = plan_transfer(self._geometry.layout, start, stop, CHUNK_TOKENS)
        wanted = {page: (len(pages), place) for place, page in enumerate(pages)}
        if any(self._laid.get(page) != place for page, place in wanted.items()):
            for page in pages:
                self._laid.pop(page, None)
            self._recording.write(plan, self._geometry.table(start, stop, pages), self._pool)
            self._laid |= wanted
        return len(plan.pieces)
