"""What gateways tell each other afterwards: decisions, what the leader did, and traffic for it to look at.

All of it waits here in bounded queues and is sent in the background. What finds no room, or no Redis for too long, is
counted and lost: it is for people and for the long-term loop, no request depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zstandard

from gateway.shared.link import RedisLink
from gateway.shared.scripts import KEEP

MOST_DECISIONS = 10_000
DECISIONS_S = 24 * 3600
MOST_WAITING = 2_048
AT_ONCE = 64
MOST_LOGGED = 4_096
MOST_TRAFFIC = 512
MAX_RECORD_BYTES = 4 << 20
_FIELDS = (b"by", b"kind", b"key", b"row")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A row of the leader's history: of which kind, under which number or name, by which gateway."""

    by: str
    kind: str
    key: str
    row: bytes


class SharedRecords:
    """``me`` is this gateway's id."""

    def __init__(self, link: RedisLink, me: str) -> None:
        self.lost = 0
        """Records that were not kept for others."""
        self._link = link
        self._me = me
        self._decisions: deque[dict[str, Any]] = deque()
        self._entries: deque[Entry] = deque()
        self._traffic: deque[bytes] = deque()
        self._last = "0"
        self._era = ""

    # ---- what is handed over; returns at once

    def decided(self, record: dict[str, Any]) -> None:
        """A request is over."""
        self._put(self._decisions, record)

    def logged(self, kind: str, key: str, row: bytes) -> None:
        """The leader keeps something in its history."""
        self._put(self._entries, Entry(self._me, kind, key, row))

    def passed(self, traffic: bytes) -> None:
        """What went through this gateway, for the leader."""
        self._put(self._traffic, traffic)

    def _put(self, queue: deque[Any], one: Any) -> None:
        if len(queue) >= MOST_WAITING:
            self.lost += 1
        else:
            queue.append(one)

    # ---- in the background

    async def flush(self) -> None:
        """Send what waits. Raises RedisAway; what was not sent waits on."""
        while self._decisions:
            batch = [self._decisions[at] for at in range(min(AT_ONCE, len(self._decisions)))]
            await self._keep(batch)
            for _ in batch:
                self._decisions.popleft()
        while self._entries:
            entry = self._entries[0]
            flat: list[str | bytes] = []
            values: tuple[str | bytes, ...] = (entry.by, entry.kind, entry.key, entry.row)
            for field, value in zip(_FIELDS, values, strict=True):
                flat += [field, value]
            await self._link.command("XADD", self._link.key("log"), "MAXLEN", "~", MOST_LOGGED, "*", *flat)
            self._entries.popleft()
        while self._traffic:
            key = self._link.key("traffic")
            await self._link.together(
                ("RPUSH", key, self._traffic[0]), ("LTRIM", key, -MOST_TRAFFIC, -1), ("EXPIRE", key, 60)
            )
            self._traffic.popleft()

    async def entries(self, era: str) -> list[Entry]:
        """What others have kept in the leader's history since the last call. Raises RedisAway."""
        if era != self._era:
            self._era, self._last = era, "0"
        found = await self._link.command("XRANGE", self._link.key("log"), f"({self._last}", "+", "COUNT", MOST_LOGGED)
        entries = []
        for number, flat in found or ():
            self._last = number.decode()
            pairs = dict(zip(flat[::2], flat[1::2], strict=True)) if not isinstance(flat, dict) else flat
            by, kind, key, row = (pairs.get(name, b"") for name in _FIELDS)
            if by.decode() != self._me:
                entries.append(Entry(by.decode(), kind.decode(), key.decode(), row))
        return entries

    async def take_traffic(self) -> list[bytes]:
        """What other gateways passed on to the leader, once. Raises RedisAway."""
        key = self._link.key("traffic")
        found, _ = await self._link.together(("LRANGE", key, 0, -1), ("DEL", key))
        return list(found)

    # ---- decisions, on any gateway

    async def find(self, name: str) -> dict[str, Any] | None:
        """A record by its internal id, or the newest of a request id. Raises RedisAway."""
        named = await self._link.command("GET", self._link.key("request", name))
        record = await self._link.command("GET", self._link.key("decision", name if named is None else named.decode()))
        return None if record is None else _unpacked(record)

    async def recent(self, limit: int) -> list[dict[str, Any]]:
        """The newest of all gateways, newest first. Raises RedisAway."""
        ids = await self._link.command("LRANGE", self._link.key("decisions"), 0, limit - 1)
        if not ids:
            return []
        found = await self._link.command("MGET", *(self._link.key("decision", one.decode()) for one in ids))
        return [_unpacked(record) for record in found if record is not None]

    async def _keep(self, batch: Sequence[dict[str, Any]]) -> None:
        keys, values = [self._link.key("decisions")], []
        for record in batch:
            keys += [self._link.key("decision", record["id"]), self._link.key("request", record["request_id"])]
            values += [record["id"], zstandard.compress(msgspec.json.encode(record), 1)]
        await self._link.script(KEEP, keys, [MOST_DECISIONS, DECISIONS_S, self._link.key("decision", ""), *values])


def _unpacked(record: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(zstandard.decompress(record, max_output_size=MAX_RECORD_BYTES))
    return found
