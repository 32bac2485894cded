"""The audit log: who changed what, and which nodes were turned away. Bounded, and kept over a restart with the state.

Every request that may change something is recorded as it was answered, whatever the answer; its body is not. Nobody can
push out what others did: each key has room of its own, and so have all nodes together.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable

import msgspec

from gateway.asgi import Scope, Send
from gateway.errors import ApiError
from gateway.state import State

log = logging.getLogger(__name__)

KEPT = 10_000
"""Entries, of each key."""
PRUNE_EVERY = 100
MOST_REFUSALS_PER_S = 5
"""Of nodes that are turned away: more is a flood, of which the metrics tell, and the log of the process."""
CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
NO_CHANGE = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/join"})
_PRUNE = """
DELETE FROM audit WHERE id IN (
    SELECT id FROM (SELECT id, row_number() OVER (PARTITION BY source ORDER BY id DESC) AS age FROM audit)
    WHERE age > ?)
"""
_HEARD = "audit_heard"
_CLUSTER = re.compile(r"/v1/clusters/([^/]+)")


class AuditEntry(msgspec.Struct, frozen=True):
    """``time`` is wall clock. ``cluster`` is "" for what concerns none, ``outcome`` an HTTP status or a cause."""

    time: float
    actor: str
    action: str
    cluster: str
    outcome: str
    detail: str = ""


class AuditLog:
    """Entries in the state, newest first. What cannot be written is said in the process's log, and nothing fails."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._written = 0
        self._again = self.heard_till() > 0
        self._began = time.time()
        self.on_added: Callable[[str, str, bytes], None] | None = None
        """Called with the source, the cluster and the record of each entry of this gateway's own."""
        self._refusals: deque[float] = deque(maxlen=MOST_REFUSALS_PER_S)

    def add(self, entry: AuditEntry, source: str | None = None) -> None:
        """Keep one more, in the room of ``source``: that of its actor where nothing else is said."""
        source, record = entry.actor if source is None else source, msgspec.json.encode(entry)
        self._keep(source, entry.cluster, record, f"actor={entry.actor} action={entry.action}")
        if self.on_added is not None:
            self.on_added(source, entry.cluster, record)

    def take(self, source: str, cluster: str, record: bytes) -> None:
        """Keep one of another gateway, once; what is not an entry is left out."""
        try:
            entry = msgspec.json.decode(record, type=AuditEntry)
        except msgspec.MsgspecError as error:
            log.warning("audit entry of another gateway not readable cause=%s", error)
            return
        if not (self._again and entry.time < self._began and self._has(source, record)):
            self._keep(source, cluster, record, "of another gateway")

    def heard_till(self) -> int:
        """Up to which of other gateways' entries this log goes, as ``heard`` was told; 0 for none. Raises ApiError."""
        rows = self._state.execute("SELECT value FROM counters WHERE name = ?", (_HEARD,))
        return int(rows[0][0]) if rows else 0

    def heard(self, number: int) -> None:
        """Entries of other gateways up to this one are kept. Raises ApiError."""
        self._state.execute("INSERT OR REPLACE INTO counters (name, value) VALUES (?, ?)", (_HEARD, number))

    def _has(self, source: str, record: bytes) -> bool:
        """Whether it was written already: this gateway was ended before it kept how far it is."""
        return bool(self._state.execute("SELECT 1 FROM audit WHERE source = ? AND record = ?", (source, record)))

    def _keep(self, source: str, cluster: str, record: bytes, what: str) -> None:
        try:
            self._state.execute(
                "INSERT INTO audit (cluster, record, source) VALUES (?, ?, ?)", (cluster, record, source)
            )
            self._written += 1
            if self._written % PRUNE_EVERY == 0:
                self._state.execute(_PRUNE, (KEPT,))
        except ApiError as error:
            log.error("audit entry lost %s cause=%s", what, error)

    def refused(self, who: str, cluster: str, cause: str, reason: str) -> None:
        """A node was turned away."""
        now = time.time()
        if len(self._refusals) == MOST_REFUSALS_PER_S and now - self._refusals[0] < 1.0:
            return
        self._refusals.append(now)
        self.add(AuditEntry(now, f"node {who}", "join", cluster, cause, reason), "nodes")

    def recent(self, limit: int, clusters: frozenset[str] | None = None) -> list[AuditEntry]:
        """The newest entries, of these clusters only."""
        if clusters is None:
            rows = self._state.execute("SELECT record FROM audit ORDER BY id DESC LIMIT ?", (limit,))
        else:
            marks = ",".join("?" * len(clusters))
            rows = self._state.execute(
                f"SELECT record FROM audit WHERE cluster IN ({marks}) ORDER BY id DESC LIMIT ?",  # noqa: S608 (marks)
                (*clusters, limit),
            )
        found = [msgspec.json.decode(row[0], type=AuditEntry) for row in rows]
        return sorted(found, key=lambda entry: entry.time, reverse=True)  # those of other gateways may come late

    def watching(self, scope: Scope, actor: str, send: Send) -> Send:
        """``send`` of a request, which also records what the request was answered where it may change something."""
        method, path = scope["method"], scope["path"]
        if method not in CHANGES or path in NO_CHANGE:
            return send
        found = _CLUSTER.match(path)

        async def watched(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                entry = AuditEntry(
                    time.time(), actor, f"{method} {path}"[:200], found[1] if found else "", str(message["status"])
                )
                self.add(entry)
            await send(message)

        return watched  # type: ignore[return-value]
