"""What a gateway remembers over a restart: one SQLite file with ticket key, API keys, clusters, decisions, conversions.

Without a file everything lives in memory and ends with the process. The file holds a private key and is created
readable by its owner alone.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway.config import ConfigError
from gateway.errors import ApiError

LOCK_WAIT_S = 1.0
"""How long a statement may wait for another process; the event loop waits with it, and a node's lease is 3.5 s."""
LOOK_EVERY_S = 0.5
"""How often what is cached of the file is held against what other processes did to it."""
SCHEMA_VERSION = 4
OPERATOR_TABLES = ("keys", "tenants", "clusters")
"""What operators say. The first column of each names a row."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, digest BLOB NOT NULL UNIQUE,
    route_hint INTEGER NOT NULL, clusters TEXT, created REAL NOT NULL, limits TEXT);
CREATE TABLE IF NOT EXISTS clusters (
    name TEXT PRIMARY KEY, dial TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL,
    egress_gbps REAL NOT NULL DEFAULT 0, terms TEXT, security TEXT);
CREATE TABLE IF NOT EXISTS decisions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, request_id TEXT NOT NULL, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS decisions_by_id ON decisions (id);
CREATE INDEX IF NOT EXISTS decisions_by_request ON decisions (request_id);
CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, terms TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS conversions (id INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS actions (id INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS audit (id INTEGER PRIMARY KEY AUTOINCREMENT, cluster TEXT NOT NULL, record BLOB NOT NULL,
    source TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS traffic_slots (
    day INTEGER NOT NULL, slot INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (day, slot));
"""
_LATER = (
    ("clusters", "egress_gbps", "REAL NOT NULL DEFAULT 0"),
    ("clusters", "terms", "TEXT"),
    ("clusters", "security", "TEXT"),
    ("audit", "source", "TEXT NOT NULL DEFAULT ''"),
    ("keys", "limits", "TEXT"),
)
"""Columns that files of older gateways lack."""


class State:
    """One SQLite connection behind a lock; every statement is short and its own transaction."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._lock = threading.Lock()
        try:
            if file is not None:
                os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(
                ":memory:" if file is None else file, check_same_thread=False, isolation_level=None, timeout=LOCK_WAIT_S
            )
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise ConfigError(f"--state {file}: written by a newer gateway (schema {version}); use that one")
            if file is not None:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            for table, column, kind in _LATER if version else ():
                if column not in [row[1] for row in self._db.execute(f"PRAGMA table_info({table})")]:
                    self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
            if version != SCHEMA_VERSION:  # a file that is as it should be opens on a full disk, too
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        except (OSError, sqlite3.DatabaseError) as error:
            raise ConfigError(f"--state {file}: {error}") from error

    def execute(self, statement: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows. Raises ApiError 503 where the file is locked, full or read-only."""
        with self._lock:
            try:
                return self._db.execute(statement, tuple(values)).fetchall()
            except sqlite3.OperationalError as error:
                raise ApiError(503, f"the state file: {error}", code="state_unavailable", retry_after_s=1) from error

    def execute_all(self, statement: str, rows: Iterable[Iterable[Any]]) -> None:
        """Run one statement with each of these values, as one transaction. Raises as ``execute``; then none was run."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(statement, [tuple(row) for row in rows])
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise ApiError(503, f"the state file: {error}", code="state_unavailable", retry_after_s=1) from error

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Inside, rows become values. Raises ConfigError naming the file where it holds what no gateway wrote."""
        try:
            yield
        except (ApiError, sqlite3.DatabaseError, ValueError, TypeError) as error:
            why, cure = " ".join(str(error).split()), "restore it from a copy, or name another file"
            raise ConfigError(f"--state {self.file}: {what} cannot be read ({why}); {cure}") from error

    def rows(self, table: str) -> list[dict[str, Any]]:
        """All of one of ``OPERATOR_TABLES``, by column. Raises as ``execute``."""
        assert table in OPERATOR_TABLES
        columns = [row[1] for row in self.execute(f"PRAGMA table_info({table})")]
        listed = self.execute(f"SELECT {', '.join(columns)} FROM {table}")  # noqa: S608 (names of ours)
        return [dict(zip(columns, row, strict=True)) for row in listed]

    def replace_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Make these all that one of ``OPERATOR_TABLES`` holds, in one step; columns unknown here are left out.

        Raises as ``execute``.
        """
        assert table in OPERATOR_TABLES
        columns = {row[1] for row in self.execute(f"PRAGMA table_info({table})")}
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute(f"DELETE FROM {table}")  # noqa: S608
                for row in rows:
                    known = {name: value for name, value in row.items() if name in columns}
                    names, marks = ", ".join(known), ", ".join("?" * len(known))
                    statement = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"  # noqa: S608
                    self._db.execute(statement, tuple(known.values()))
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise ApiError(503, f"the state file: {error}", code="state_unavailable", retry_after_s=1) from error

    def outside_changes(self) -> int:
        """A number that differs whenever another process has changed the file."""
        return int(self.execute("PRAGMA data_version")[0][0])

    def role_epoch(self) -> int:
        """The newest epoch of a role order that was kept; 0 for none."""
        rows = self.execute("SELECT value FROM counters WHERE name = 'role_epoch'")
        return int(rows[0][0]) if rows else 0

    def keep_role_epoch(self, epoch: int) -> None:
        """Remember that orders up to this epoch were given, whoever numbered them."""
        self.execute(
            "INSERT INTO counters (name, value) VALUES ('role_epoch', ?) "
            "ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)",
            (epoch,),
        )

    def ticket_key(self) -> Ed25519PrivateKey:
        """The key that signs tickets, made at first use."""
        find = "SELECT value FROM secrets WHERE name = 'ticket_key'"
        with self.reading("the ticket key"):
            if not self.execute(find):
                fresh = Ed25519PrivateKey.generate().private_bytes_raw()
                self.execute("INSERT OR IGNORE INTO secrets VALUES ('ticket_key', ?)", (fresh,))
            return Ed25519PrivateKey.from_private_bytes(self.execute(find)[0][0])

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._db.close()


class OutsideChanges:
    """Whether another process has written to the state since it was last asked; it is looked at twice a second."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._seen = -1
        self._looked_at = float("-inf")

    def changed(self) -> bool:
        """True for the first question, too: nothing was read before it. Raises as ``State.outside_changes``."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_EVERY_S:
            return False
        self._looked_at = now
        version = self._state.outside_changes()
        if version == self._seen:
            return False
        self._seen = version
        return True
