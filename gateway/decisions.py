"""Decision records: why a request went where it went, and what came of it. Bounded in memory and on disk."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from gateway.state import State

log = logging.getLogger(__name__)

T = TypeVar("T")
Record = dict[str, Any]
"""By field; what is in it may be structs still, which are made plain for those who ask."""
encode = msgspec.json.Encoder(order="deterministic").encode
"""A record as JSON."""

IN_MEMORY = 1024
ON_DISK = 10_000
PRUNE_EVERY = 100
MAX_UNWRITTEN = 1024
AT_ONCE = 64
"""Records that are written in one transaction where so many have come meanwhile."""
TOGETHER_S = 0.1
"""How long the first of them waits for others: a transaction costs as much as routing a few requests."""
PAGE = 100


class Decisions:
    """The newest records by internal id and by request id. One thread writes them to the state file, if there is one.

    It has a connection of its own, so that requests never wait for the disk; a record lost to a full queue is counted
    in ``unwritten``.
    """

    def __init__(self, state: State) -> None:
        self._disk = None if state.file is None else State(state.file)
        self._recent: OrderedDict[str, Record] = OrderedDict()
        self._writer = None if self._disk is None else ThreadPoolExecutor(1, thread_name_prefix="decisions")
        self._waiting: deque[Record] = deque()
        self._called = False
        self._hurry = threading.Event()
        self._written = 0
        self.unwritten = 0
        self._failing = False
        self.on_added: Callable[[Record], None] | None = None
        """Called with every record; returns at once."""

    def add(self, record: Record) -> None:
        """Keep a finished request's record, which has ``id`` and ``request_id`` and is not changed any more."""
        self._recent[record["id"]] = record
        if self.on_added is not None:
            self.on_added(record)
        if len(self._recent) > IN_MEMORY:
            self._recent.popitem(last=False)
        if self._writer is None:
            return
        if len(self._waiting) >= MAX_UNWRITTEN:
            self.unwritten += 1
            return
        self._waiting.append(record)
        if not self._called:
            self._called = True
            self._writer.submit(self._write_all)

    def find(self, name: str) -> dict[str, Any] | None:
        """The record of an internal id, or the newest of a request id."""
        if name in self._recent:
            return _plain(self._recent[name])
        for record in reversed(self._recent.values()):
            if record["request_id"] == name:
                return _plain(record)
        if self._disk is None:
            return None
        rows = self._disk.execute(
            "SELECT record FROM decisions WHERE id = ? OR request_id = ? ORDER BY seq DESC LIMIT 1", (name, name)
        )
        return msgspec.json.decode(rows[0][0]) if rows else None

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """The newest records, newest first."""
        if len(self._recent) >= limit or self._disk is None:
            return [_plain(record) for record in list(reversed(self._recent.values()))[:limit]]
        rows = self._disk.execute("SELECT record FROM decisions ORDER BY seq DESC LIMIT ?", (limit,))
        return [msgspec.json.decode(row[0]) for row in rows]

    def each(self, kind: type[T], limit: int = ON_DISK) -> list[T]:
        """The newest records as ``kind``, which may lack fields, newest first; what does not fit is left out."""
        rows: Iterable[Record | bytes]
        if self._disk is None:
            rows = [_plain(record) for record in list(reversed(self._recent.values()))[:limit]]
        else:
            statement = "SELECT record FROM decisions ORDER BY seq DESC LIMIT ?"
            rows = [row[0] for row in self._disk.execute(statement, (limit,))]
        found = []
        for row in rows:
            with suppress(msgspec.ValidationError):
                found.append(
                    msgspec.json.decode(row, type=kind) if isinstance(row, bytes) else msgspec.convert(row, kind)
                )
        return found

    @property
    def most_kept(self) -> int:
        """How many records there may be."""
        return IN_MEMORY if self._disk is None else ON_DISK

    def page(self, after: int, most: int = PAGE) -> tuple[list[bytes], int]:
        """Up to ``most`` records as JSON, oldest first, and where the next page begins; the first is after 0.

        Without a disk the first page has all. What was added before the call is in it, written or not.
        """
        if self._disk is None or self._writer is None:
            return [encode(record) for record in (() if after else list(self._recent.values()))], 1
        self._hurry.set()
        self._writer.submit(int).result()  # all that was handed over before is written now
        statement = "SELECT seq, record FROM decisions WHERE seq > ? ORDER BY seq LIMIT ?"
        rows = self._disk.execute(statement, (after, most))
        return [row[1] for row in rows], rows[-1][0] if rows else after

    def close(self) -> None:
        """Write what is pending. Idempotent."""
        self._hurry.set()
        if self._writer is not None and self._disk is not None:
            self._writer.shutdown(wait=True)
            self._disk.close()

    def _write_all(self) -> None:
        self._hurry.wait(TOGETHER_S)
        self._hurry.clear()
        self._called = False  # before it looks: what comes after it looked for the last time has another call
        while self._waiting:
            self._write([self._waiting[at] for at in range(min(AT_ONCE, len(self._waiting)))])

    def _write(self, records: list[Record]) -> None:
        """Write the oldest of those that wait, which keep their places until they are written."""
        assert self._disk is not None
        before = self._written // PRUNE_EVERY
        try:
            self._disk.execute_all(
                "INSERT INTO decisions (id, request_id, record) VALUES (?, ?, ?)",
                [(record["id"], record["request_id"], encode(record)) for record in records],
            )
            self._written += len(records)
            self._failing = False
            if self._written // PRUNE_EVERY > before:
                self._disk.execute(
                    "DELETE FROM decisions WHERE seq <= (SELECT max(seq) FROM decisions) - ?", (ON_DISK,)
                )
        except Exception as error:  # a full or broken disk must not touch requests, nor fill the log
            self.unwritten += len(records)
            if not self._failing:
                self._failing = True
                log.error("decisions are not written from id=%s on: %s", records[0]["id"], error)
        finally:
            for _ in records:
                self._waiting.popleft()


def _plain(record: Record) -> dict[str, Any]:
    """As it comes from the disk."""
    found: dict[str, Any] = msgspec.to_builtins(record, order="deterministic", str_keys=True)
    return found
