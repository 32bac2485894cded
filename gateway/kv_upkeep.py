"""What the prefix index needs while a gateway runs: subscriptions to engines, snapshots, forgetting who stays away.

The snapshot lies beside the state file. It saves a restarted gateway from being told everything anew; without it, or
with a torn one, the nodes tell.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gateway.config import EngineEvents
from gateway.kv_index import KvIndex
from gateway.kv_source import Snapshot
from gateway.kv_subscriber import EngineSubscriber
from kvcache.background import in_background
from scheduler.index_snapshot import SnapshotError

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 1.0
SNAPSHOT_EVERY_S = 60.0
MOST_BLOCKS_IN_PASSING = 200_000
MOST_RUNS_IN_PASSING = 2_500
"""A larger index is written at the end alone: its snapshot would hold up the event loop, some 50 ms for these."""
MAX_SNAPSHOT_BYTES = 1 << 30


_decoder = msgspec.msgpack.Decoder(Snapshot)


class KvUpkeep:
    """``start`` on the event loop; ``stop`` ends what it began."""

    def __init__(self, index: KvIndex, engines: Sequence[EngineEvents], state_file: Path | None) -> None:
        self._index = index
        self._engines = engines
        self._file = None if state_file is None else state_file.with_name(state_file.name + ".prefixes")
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Take what the last gateway wrote, and begin all of it."""
        self._read()
        self._begin(self._sweep())
        self._begin(self._write_often())
        for events in self._engines:
            self._begin(EngineSubscriber(events, self._index).run())

    async def stop(self) -> None:
        """End all of it, and write what is known. Idempotent."""
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._write(self._index.dump(asyncio.get_running_loop().time()))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(in_background(work, log, "upkeep of the prefix index broke"))

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            self._index.sweep(loop.time())

    def _read(self) -> None:
        if self._file is None:
            return
        try:
            if self._file.stat().st_size > MAX_SNAPSHOT_BYTES:
                raise SnapshotError(f"more than {MAX_SNAPSHOT_BYTES} bytes")
            kept = _decoder.decode(self._file.read_bytes())
            self._index.restore(kept, asyncio.get_running_loop().time())
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, RecursionError, SnapshotError) as error:
            log.warning("prefix index begins empty: %s: %s", self._file, error)
        else:
            log.info("prefix index restored blocks=%d", len(self._index.index))

    @property
    def _is_small(self) -> bool:
        index = self._index.index
        return len(index) <= MOST_BLOCKS_IN_PASSING and len(index.tree.runs) <= MOST_RUNS_IN_PASSING

    async def _write_often(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SNAPSHOT_EVERY_S)
            if self._file is not None and self._is_small:
                await asyncio.to_thread(self._write, self._index.dump(loop.time()))

    def _write(self, kept: Snapshot) -> None:
        """Under another name first: who reads it finds the old one or the new one, whole."""
        if self._file is None:
            return
        fresh = self._file.with_name(self._file.name + ".new")
        try:
            fresh.unlink(missing_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(msgspec.msgpack.encode(kept))
            fresh.replace(self._file)
        except OSError as error:
            log.warning("prefix index not written: %s: %s", self._file, error)
