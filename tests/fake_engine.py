"""An engine in this process that refuses what a real one refuses and checks what it is given, byte by byte.

It "computes" bytes that follow from the prompt alone, so the decode side's fake knows what must lie in its pages. It
fails a test that lets it touch a page nobody owns.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from engines.protocol import (
    Checkpoint,
    EngineInfo,
    EngineLost,
    Exported,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobEvent,
    JobFailed,
    Loaded,
    Offered,
    PrefillCommand,
    PrefillFinished,
    Spoken,
    StoreCommand,
    Stored,
    Token,
)
from kvcache.blocks import PageGeometry, PagePool, PageTable
from kvcache.hostpool import HostPool
from kvcache.layout import GroupKind
from kvcache.plan import Piece, chunk_bounds, plan_transfer


def piece_bytes(token_ids: Sequence[int], piece: Piece) -> bytes:
    """What a piece of this prompt's cache holds: of each token, or of a state, what follows from all tokens before."""
    seeds = _seeds(tuple(token_ids))
    where = f"{piece.group} {piece.layer} {piece.tensor}".encode()
    if piece.start == piece.stop:
        return hashlib.shake_128(seeds[piece.stop] + where).digest(piece.nbytes)
    size = piece.nbytes // (piece.stop - piece.start)
    return b"".join(hashlib.shake_128(seeds[n] + where).digest(size) for n in range(piece.start, piece.stop))


@lru_cache(maxsize=64)
def _seeds(token_ids: tuple[int, ...]) -> list[bytes]:
    """For every length, a digest of so many first tokens."""
    seeds = [b""]
    for token in token_ids:
        seeds.append(hashlib.blake2b(seeds[-1] + token.to_bytes(4, "big"), digest_size=16).digest())
    return seeds


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
    """``speech`` is what every generation says; ``cached`` tells how many tokens a prefill went on from.
    ``check_bytes`` False takes what an inexact codec left of them.

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
        self.commands: list[GenerateCommand] = []
        self.cached: dict[str, int] = {}
        self.check_bytes = True
        self.fail_prefill_after: int | None = None
        self._geometry = geometry
        self._pool = pool
        self._pages = pages
        self._chunk_tokens = chunk_tokens
        self._lost_event = asyncio.Event()
        self._streams: dict[str, FakeStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._prefills: dict[str, asyncio.Event] = {}
        self._finishing: set[str] = set()
        self._offers: dict[tuple[str, int], asyncio.Future[StoreCommand]] = {}

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("fake", "float32", 8192, 512, self._chunk_tokens, 1000.0, 10.0)

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
            work = partial(self._prefill, command, self._prefills[command.job])
        else:
            work = partial(self._generate, command)
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
            end = await work()
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
        if command.cached:
            self.cached[command.job] = command.cached
            self._check_holds(command.job, command.token_ids, command.cached, command.cached_pages)
        wanted = list(command.checkpoints)
        for chunk, (_, end) in enumerate(chunk_bounds(command.start, command.stop, self._chunk_tokens)):
            pieces = [piece for piece in plan.pieces if piece.chunk == chunk]
            if end > command.cached:
                if self.hold_at == chunk:
                    self.gate.clear()
                await _first(self.gate, cancelled)
                await asyncio.sleep(self.chunk_s if cancelled.is_set() else 0)
                if self.fail_prefill_after == chunk:
                    return JobFailed(command.job, "boom", "as the test wanted")
            self._check_owned(command.pages)
            for piece in pieces:
                full = self._geometry.layout.groups[piece.group].kind is GroupKind.FULL
                if full and piece.start < command.cached:
                    tokens = piece.stop - piece.start
                    fresh = min(piece.stop, max(piece.start, command.cached))
                    piece = replace(piece, start=fresh, nbytes=piece.nbytes // tokens * (piece.stop - fresh))
                if not full or piece.start < piece.stop:
                    self._write(table, piece, command.token_ids)
            if cancelled.is_set():
                return JobCancelled(command.job, chunk * self._chunk_tokens)
            self._streams[command.job].put(Exported(command.job, pieces[-1].seq + 1))
            while wanted and wanted[0].stop <= end:
                await self._offer(command.job, wanted.pop(0), command.token_ids, cancelled)
        await _first(self.ending, cancelled)
        self.prefilled.append(command.job)
        return PrefillFinished(command.job, 0.01)

    async def _generate(self, command: GenerateCommand) -> JobEvent:
        self.commands.append(command)
        prefix = len(command.token_ids) - 1
        if command.loaded:
            if command.loaded != prefix and command.loaded % self._geometry.block_tokens:
                return JobFailed(command.job, "bad_command", "loaded")
            await self.load.wait()
            if not self._check_holds(command.job, command.token_ids, command.loaded, command.pages):
                return JobFailed(command.job, "corrupt", "the pages hold other bytes")
            self._streams[command.job].put(Loaded(command.job))
        if command.loaded < prefix:
            self.cached[command.job] = command.loaded
        for each in command.checkpoints:
            await self._offer(command.job, each, command.token_ids)
        said = []
        for token in self.speech[: command.sampling.max_tokens]:
            await self.voice.wait()
            if command.job in self._finishing:
                break
            said.append(token)
            self._streams[command.job].put(Token(command.job, token))
            await asyncio.sleep(0)
        if command.job not in self._finishing:
            self.generated.append(command.job)
        await self._offer_answer(command, said)
        return GenerationFinished(command.job, self.reason)

    async def _offer_answer(self, command: GenerateCommand, said: list[int]) -> None:
        ids = (*command.token_ids, *said)[: len(command.token_ids) - 1 + len(said)]
        stop = len(ids) - len(ids) % self._geometry.block_tokens
        if command.keep_from is not None and stop > command.keep_from:
            self._streams[command.job].put(Spoken(command.job, self.reason))
            await self._offer(command.job, Checkpoint(command.keep_from, stop), ids)

    async def _offer(
        self, job: str, wanted: Checkpoint, token_ids: Sequence[int], cancelled: asyncio.Event | None = None
    ) -> None:
        """Offer blocks, and windows and states; write them where the node says."""
        answer: asyncio.Future[StoreCommand] = asyncio.get_running_loop().create_future()
        self._offers[job, wanted.stop] = answer
        self._streams[job].put(Offered(job, wanted.start, wanted.stop, wanted.snapshot))
        if cancelled is None:
            command = await answer
        else:
            gone = asyncio.create_task(cancelled.wait())
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not answer.done():
                return
            command = answer.result()
        if command.pages:
            self._check_owned(command.pages)
            geometry = self._geometry if wanted.snapshot else self._geometry.blocks_only
            table = geometry.table(wanted.start, wanted.stop, command.pages)
            for piece in self._pieces(wanted.start, wanted.stop, wanted.snapshot):
                self._write(table, piece, token_ids)
        self._streams[job].put(Stored(job, wanted.stop, bool(command.pages)))

    def finish(self, job: str) -> None:
        self._finishing.add(job)

    def store(self, command: StoreCommand) -> None:
        answer = self._offers.pop((command.job, command.stop), None)
        if answer is not None and not answer.done():
            answer.set_result(command)

    def _pieces(self, start: int, stop: int, ends: bool = True) -> Iterator[Piece]:
        """The cache of [start, stop), and windows and states at ``stop``, tensor by tensor."""
        for g, group in enumerate(self._geometry.layout.groups):
            for n, layer in enumerate(group.layers):
                for t, spec in enumerate(layer.tensors):
                    if group.kind is GroupKind.FULL:
                        if start < stop:
                            yield Piece(0, g, n, t, start, stop, 0, spec.nbytes * (stop - start))
                    elif ends and group.kind is GroupKind.SLIDING:
                        first = group.first_token(stop)
                        yield Piece(0, g, n, t, first, stop, 0, spec.nbytes * (stop - first))
                    elif ends:
                        yield Piece(0, g, n, t, stop, stop, 0, spec.nbytes)

    def _write(self, table: PageTable, piece: Piece, token_ids: Sequence[int]) -> None:
        data, at = piece_bytes(token_ids, piece), 0
        for view in self._pool.views(table.extents(piece)):
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes

    def _check_holds(self, job: str, token_ids: Sequence[int], stop: int, pages: Sequence[int]) -> bool:
        """Whether the pages hold what this prompt's first tokens left, all of it."""
        self._check_owned(pages)
        table = self._geometry.table(0, stop, pages)
        for piece in self._pieces(0, stop):
            held = b"".join(self._pool.views(table.extents(piece)))
            if self.check_bytes and held != piece_bytes(token_ids, piece):
                self.faults.append(f"{job} was given other bytes than were exported")
                return False
        return True

    def _check_owned(self, pages: Sequence[int]) -> None:
        owned = {page for held in self._pages._owned.values() for page in held}
        if not (owned | self._pages.kept_pages).issuperset(pages):
            self.faults.append("touched pages that nobody owns")


async def _first(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
