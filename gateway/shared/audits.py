"""What the audit log of one gateway says, in those of all: each entry goes over Redis into every gateway's own state.

Entries wait here in a bounded queue and are sent in the background; what finds no room, or no Redis for too long, is
counted and is in the log of its own gateway alone. A gateway that comes back goes on where it was.
"""

from __future__ import annotations

from collections import deque

from gateway.audit import AuditLog
from gateway.shared.link import RedisLink

MOST_WAITING = 2_048
MOST_KEPT = 8_192
"""Entries that Redis keeps for gateways that are away."""
AT_ONCE = 256
_SEQUENCE_BITS = 20
_FIELDS = ("by", "source", "cluster", "record")


class SharedAudit:
    """``me`` is this gateway's id."""

    def __init__(self, link: RedisLink, me: str) -> None:
        self.lost = 0
        """Entries that were not told to others."""
        self._link = link
        self._me = me
        self._waiting: deque[tuple[str, str, bytes]] = deque()
        self._era: str | None = None
        self._last: int | None = None

    def added(self, source: str, cluster: str, record: bytes) -> None:
        """This gateway has kept one; returns at once."""
        if len(self._waiting) >= MOST_WAITING:
            self.lost += 1
        else:
            self._waiting.append((source, cluster, record))

    async def flush(self) -> None:
        """Send what waits. Raises RedisAway; what was not sent waits on."""
        key = self._link.key("audit")
        while self._waiting:
            batch = [self._waiting[at] for at in range(min(AT_ONCE, len(self._waiting)))]
            commands: list[list[str | bytes | int]] = []
            for entry in batch:
                values: tuple[str | bytes, ...] = (self._me, *entry)
                commands.append(["XADD", key, "MAXLEN", "~", MOST_KEPT, "*"])
                for field, value in zip(_FIELDS, values, strict=True):
                    commands[-1] += [field, value]
            await self._link.together(*commands)
            for _ in batch:
                self._waiting.popleft()

    async def take(self, era: str, audit: AuditLog) -> None:
        """Keep what others have said since the last call. Raises RedisAway."""
        if self._last is None:
            self._last = audit.heard_till()
        elif era != self._era:
            self._last = 0
        self._era = era
        after = f"({self._last >> _SEQUENCE_BITS}-{self._last & (1 << _SEQUENCE_BITS) - 1}"
        found = await self._link.command("XRANGE", self._link.key("audit"), after, "+", "COUNT", AT_ONCE)
        for number, flat in found or ():
            pairs = dict(zip(flat[::2], flat[1::2], strict=True)) if not isinstance(flat, dict) else flat
            by, source, cluster, record = (pairs.get(name.encode(), b"") for name in _FIELDS)
            if by.decode() != self._me:
                audit.take(source.decode(), cluster.decode(), bytes(record))
            milliseconds, _, sequence = number.decode().partition("-")
            self._last = int(milliseconds) << _SEQUENCE_BITS | min(int(sequence), (1 << _SEQUENCE_BITS) - 1)
        if found:
            audit.heard(self._last)
