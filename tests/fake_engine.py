"""An engine in this process that refuses what a real one refuses and checks what it is given, byte by byte.

It "computes" bytes that follow from the prompt alone, so the decode side's fake knows what must lie in its pages. It
fails a test that lets it touch a page nobody owns.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from engines.protocol import (
    EngineInfo,
    EngineLost,
    Exported,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobEvent,
    JobFailed,
    Loaded,
    PrefillCommand,
    PrefillFinished,
    Token,
)
from kvcache.blocks import PageGeometry, PagePool
from kvcache.hostpool import HostPool
from kvcache.plan import Piece, TransferPlan, chunk_bounds, plan_transfer


def piece_bytes(token_ids: Sequence[int], piece: Piece) -> bytes:
    """What a piece of this prompt's cache holds."""
    seed = repr((tuple(token_ids[: piece.stop]), piece.group, piece.layer, piece.tensor, piece.start, piece.stop))
    return hashlib.shake_128(seed.encode()).digest(piece.nbytes)


class FakeStream:
    """One job's events."""

    def __init__(self, engine: FakeEngine, job: str) -> None:
        self._engine = engine
        self._job = job
        self._events: asyncio.Queue[JobEvent | None] = asyncio.Queue()
        self._over = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> JobEvent:
        if self._over:
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None:
            self._over = True
            raise EngineLost(self._engine.lost or "lost")
        self._over = isinstance(event, PrefillFinished | GenerationFinished | JobCancelled | JobFailed)
        return event

    async def aclose(self) -> None:
        await self._engine.cancel(self._job)
        while not self._over:
            try:
                await self.__anext__()
            except EngineLost:
                return

    def put(self, event: JobEvent | None) -> None:
        self._events.put_nowait(event)


class FakeEngine:
    """``speech`` is what every generation says.

    While cleared, ``gate`` holds every prefill before its next chunk, ``load`` every loading, ``voice`` every token,
    ``ending`` the word that a prefill is finished. A cancelled prefill still computes for ``chunk_s``. ``hold_at``
    clears the gate before that chunk; ``fail_prefill_after`` that many chunks the job fails.
    """

    def __init__(self, geometry: PageGeometry, pool: HostPool, pages: PagePool, chunk_tokens: int) -> None:
        self.speech: list[int] = [7, 8, 9]
        self.reason = "length"
        self.chunk_s = 0.01
        self.hold_at: int | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.ending = asyncio.Event()
        self.ending.set()
        self.voice = asyncio.Event()
        self.voice.set()
        self.load = asyncio.Event()
        self.load.set()
        self.lost: str | None = None
        self.faults: list[str] = []
        self.prefilled: list[str] = []
        self.generated: list[str] = []
        self.priorities: list[int] = []
        self.fail_prefill_after: int | None = None
        self._geometry = geometry
        self._pool = pool
        self._pages = pages
        self._chunk_tokens = chunk_tokens
        self._lost_event = asyncio.Event()
        self._streams: dict[str, FakeStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._prefills: dict[str, asyncio.Event] = {}

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("fake", "float32", 8192, 512, self._chunk_tokens, (1,), 1000.0, 10.0)

    @property
    def jobs(self) -> set[str]:
        return set(self._streams)

    def submit(self, command: PrefillCommand | GenerateCommand) -> FakeStream:
        if command.job in self._streams:
            raise ValueError(f"job {command.job!r} is still running")
        stream = FakeStream(self, command.job)
        if self.lost is not None:
            stream.put(None)
            return stream
        self._streams[command.job] = stream
        if isinstance(command, PrefillCommand):
            self._prefills[command.job] = asyncio.Event()
            work = self._prefill(command, self._prefills[command.job])
        else:
            work = self._generate(command)
        self._tasks[command.job] = asyncio.create_task(self._job(command.job, work))
        return stream

    async def cancel(self, job: str) -> None:
        """A prefill ends after the chunk at hand, which it still writes; a generation ends at once."""
        if job in self._prefills:
            self._prefills[job].set()
        elif job in self._tasks:
            self._tasks[job].cancel()

    async def wait_lost(self) -> str:
        await self._lost_event.wait()
        return self.lost or ""

    async def close(self) -> None:
        self.lose("closed")

    def lose(self, cause: str) -> None:
        """Die: every stream raises EngineLost."""
        if self.lost is None:
            self.lost = cause
            self._lost_event.set()
            streams, self._streams = self._streams, {}
            for task in self._tasks.values():
                task.cancel()
            for stream in streams.values():
                stream.put(None)

    async def _job(self, job: str, work) -> None:
        try:
            end = await work
        except asyncio.CancelledError:
            end = JobCancelled(job)
        finally:
            self._tasks.pop(job, None)
            self._prefills.pop(job, None)
        stream = self._streams.pop(job, None)
        if stream is not None:
            stream.put(end)

    async def _prefill(self, command: PrefillCommand, cancelled: asyncio.Event) -> JobEvent:
        self.priorities.append(command.priority)
        plan = plan_transfer(self._geometry.layout, command.start, command.stop, self._chunk_tokens)
        table = self._geometry.table(command.start, command.stop, command.pages)
        if len(command.token_ids) != command.stop:
            return JobFailed(command.job, "bad_command", f"{len(command.token_ids)} ids for [0, {command.stop})")
        for chunk, _ in enumerate(chunk_bounds(command.start, command.stop, self._chunk_tokens)):
            if self.hold_at == chunk:
                self.gate.clear()
            await _first(self.gate, cancelled)
            await asyncio.sleep(self.chunk_s if cancelled.is_set() else 0)
            if self.fail_prefill_after == chunk:
                return JobFailed(command.job, "boom", "as the test wanted")
            pieces = [piece for piece in plan.pieces if piece.chunk == chunk]
            self._check_owned(command.pages)
            for piece in pieces:
                data, at = piece_bytes(command.token_ids, piece), 0
                for view in self._pool.views(table.extents(piece)):
                    view[:] = data[at : at + view.nbytes]
                    at += view.nbytes
            if cancelled.is_set():
                return JobCancelled(command.job, chunk * self._chunk_tokens)
            self._streams[command.job].put(Exported(command.job, pieces[-1].seq + 1))
        await _first(self.ending, cancelled)
        self.prefilled.append(command.job)
        return PrefillFinished(command.job, 0.01)

    async def _generate(self, command: GenerateCommand) -> JobEvent:
        if command.loaded:
            if command.loaded != len(command.token_ids) - 1:
                return JobFailed(command.job, "bad_command", "loaded")
            await self.load.wait()
            self._check_owned(command.pages)
            plan = plan_transfer(self._geometry.layout, 0, command.loaded, self._chunk_tokens)
            if not self._equal(plan, command):
                self.faults.append(f"{command.job} was given other bytes than were exported")
                return JobFailed(command.job, "corrupt", "the pages hold other bytes")
            self._streams[command.job].put(Loaded(command.job))
        for token in self.speech[: command.sampling.max_tokens]:
            await self.voice.wait()
            self._streams[command.job].put(Token(command.job, token))
            await asyncio.sleep(0)
        self.generated.append(command.job)
        return GenerationFinished(command.job, self.reason)

    def _equal(self, plan: TransferPlan, command: GenerateCommand) -> bool:
        table = self._geometry.table(plan.start, plan.stop, command.pages)
        return all(
            b"".join(self._pool.views(table.extents(piece))) == piece_bytes(command.token_ids, piece)
            for piece in plan.pieces
        )

    def _check_owned(self, pages: Sequence[int]) -> None:
        owned = {page for held in self._pages._owned.values() for page in held}
        if not owned.issuperset(pages):
            self.faults.append("touched pages that nobody owns")


async def _first(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
