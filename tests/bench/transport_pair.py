"""One process that serves KV and this one that fetches it, by any transport that both have, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from unittest import mock

from engines.protocol import Exported, JobEvent, PrefillCommand, PrefillFinished
from kvcache.control import KvAddress
from kvcache.plan import plan_transfer
from node.bench.kv import party
from node.bench.kv.capture import synthetic
from node.bench.kv.credentials import Credentials
from node.bench.kv.fetch import Fetched, KvFetcher
from node.bench.kv.recording import CHUNK_TOKENS
from node.bench.kv.replay import ReplayEngine
from node.bench.kv.serve import KvServer

NIXL = "nixl"
CONNECTIONS = 4
CONNECT_S = 30.0


class PacedReplay(ReplayEngine):
    """Exports layer by layer, and takes ``compute_s`` for all of them together: as an accelerator that computes would.

    The processor is free meanwhile; what a layer takes is the same for each.
    """

    compute_s = 0.0

    async def _export(self, command: PrefillCommand) -> AsyncIterator[JobEvent]:
        await asyncio.to_thread(self._lay, command.start, command.stop, command.pages)
        pieces = plan_transfer(self._geometry.layout, command.start, command.stop, CHUNK_TOKENS).pieces
        ends = [n for n in range(1, len(pieces)) if _layer(pieces[n]) != _layer(pieces[n - 1])] + [len(pieces)]
        loop, each = asyncio.get_running_loop(), PacedReplay.compute_s / len(ends)
        began = loop.time()
        for count, end in enumerate(ends, 1):
            if each:
                await asyncio.sleep(max(0.0, began + count * each - loop.time()))
            yield Exported(command.job, end)
        yield PrefillFinished(command.job, loop.time() - began)


def _layer(piece: object) -> tuple[int, int, int]:
    return piece.chunk, piece.group, piece.layer  # type: ignore[attr-defined]


async def _serve(pipe: Pipe, nbytes: int, credentials: Path, nixl: bool) -> None:
    with mock.patch.object(party, "ReplayEngine", PacedReplay):
        server = KvServer(synthetic(), nbytes, trusted_network=False, nixl=nixl)
    try:
        port = await server.listen("127.0.0.1", 0, None)
        server.credentials(None).write(credentials)
        pipe.send(port)
        while (compute_s := await asyncio.to_thread(pipe.recv)) is not None:
            PacedReplay.compute_s = compute_s
            pipe.send(None)
    finally:
        await server.close()


def _child(pipe: Pipe, nbytes: int, credentials: Path, nixl: bool) -> None:
    asyncio.run(_serve(pipe, nbytes, credentials, nixl))


@dataclass
class TransportPair:
    """The two processes; one fetcher for each transport."""

    pid: int
    nbytes: int
    layers: int
    _pipe: Pipe
    _fetchers: dict[str, KvFetcher] = field(default_factory=dict)

    async def fetch(self, transport: str, compute_s: float = 0.0) -> Fetched:
        """One transfer beside a computation that takes so long. Raises FetchFailed where something else carried it."""
        self._pipe.send(compute_s)
        await asyncio.to_thread(self._pipe.recv)
        return await self._fetchers[transport].fetch(60.0)


@contextlib.asynccontextmanager
async def transport_pair(transports: Sequence[str], nbytes: int) -> AsyncIterator[TransportPair]:
    """Two processes for as long as the block lasts; each transport is used once, to warm up."""
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "credentials.json"
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_child, args=(theirs, nbytes, path, NIXL in transports), daemon=True)
        process.start()
        fetchers: dict[str, KvFetcher] = {}
        try:
            address = KvAddress("127.0.0.1", await asyncio.to_thread(ours.recv))
            known = Credentials.read(path)
            for transport in transports:
                fetchers[transport] = fetcher = KvFetcher(
                    known, address, "raw", CONNECTIONS, None, trusted_network=False, transport=transport
                )
                await fetcher.connect(CONNECT_S)
            assert process.pid is not None
            layers = sum(len(group.layers) for group in known.subject.layout.groups)
            pair = TransportPair(process.pid, known.subject.nbytes, layers, ours, fetchers)
            for transport in transports:
                await pair.fetch(transport)
            yield pair
        finally:
            for fetcher in fetchers.values():
                await fetcher.close()
            with contextlib.suppress(OSError):
                ours.send(None)
            process.join(10)
            process.kill()
