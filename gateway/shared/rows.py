"""What operators say (keys, tenants, clusters), the same on every gateway: rows of the state, mirrored over Redis.

Every gateway reads its own state, as if it were alone; this module makes that state follow. A change is made here first
and counts once Redis has taken it, unless another gateway changed something in between. A gateway that comes adds what
it has in its file and Redis never heard of; for the rest Redis is right. One that was emptied gets back what they know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from gateway.errors import ApiError
from gateway.shared.link import RedisAway, RedisLink
from gateway.shared.scripts import SEED, WRITE
from gateway.state import OPERATOR_TABLES, State

log = logging.getLogger(__name__)

Rows = dict[str, bytes]
"""Of one table: encoded rows by their first column."""


class SharedRows:
    """``reload`` are called whenever the state's rows have become others."""

    def __init__(self, link: RedisLink, state: State, reload: Sequence[Callable[[], None]] = ()) -> None:
        self._link = link
        self._state = state
        self._reload = list(reload)
        self._held: list[Callable[[], None]] = []
        self._known: dict[str, Rows] = {}
        self._era: str | None = None
        self._rev = ""
        self._lock = asyncio.Lock()

    def tell(self, *reload: Callable[[], None]) -> None:
        """Call these, too."""
        self._reload += reload

    @property
    def follows(self) -> tuple[str, int] | None:
        """Which life of Redis, and which revision there, the state is as; None before the first."""
        return None if self._era is None else (self._era, int(self._rev))

    async def news(self, rev: str, seconds: float) -> bool:
        """Wait for a revision above this one, for so long at most; whether there is one. Raises RedisAway."""
        wait = max(1, int(seconds * 1000))  # 0 would be for ever
        found = await self._link.command("XREAD", "BLOCK", wait, "STREAMS", self._link.key("news"), f"{rev}-0")
        return bool(found)

    def when_held(self, told: Callable[[], None]) -> None:
        """Call this whenever rows have changed and the change cannot be taken back any more."""
        self._held.append(told)

    async def follow(self, era: str, rev: str) -> None:
        """What a beat found: read what changed, and first put there what this life of Redis lacks. Raises RedisAway."""
        if era == self._era and rev == self._rev:
            return
        async with self._lock:
            if era != self._era:
                await self._put_there(era)
            await self._read()

    async def first(self) -> None:
        """Before anything is served: take what there is, and leave out what was removed. Raises RedisAway.

        The first ``follow`` adds what only this gateway knows.
        """
        brought = self._local()
        for table, names in (await self._removed()).items():
            for name in names:
                brought[table].pop(name, None)
        found = await self._link.together(*(("HGETALL", self._link.key("rows", table)) for table in OPERATOR_TABLES))
        self._apply({table: brought[table] | _rows(rows) for table, rows in zip(OPERATOR_TABLES, found, strict=True)})

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """What is changed in the state inside is changed everywhere. Raises ApiError 503 where it cannot be.

        Inside, the state is as new as Redis has it. Where a change does not get there it is taken back here.
        """
        async with self._lock:
            try:
                await self._read()
            except RedisAway as away:
                raise _refused(str(away)) from away
            try:
                yield
                changes = self._changes()
                taken = await self._write(changes) if changes else True
            except RedisAway as away:
                self._apply(self._known)
                raise _refused(str(away)) from away
            except BaseException:
                if self._changes():
                    self._apply(self._known)
                raise
            if not taken:
                await self._reread()
                raise ApiError(
                    409, "another gateway changed something at the same time; try again", code="changed_meanwhile"
                )
            self._known = self._local()
            if changes:
                self._tell_held()

    async def _read(self) -> None:
        """Make the state what Redis holds; what it has lost is put there again. Raises RedisAway."""
        era, rev, known = await self._held_there()
        lost = self._lost(known, await self._removed()) if self._lacks(known) else []
        if lost:
            log.warning(
                "redis %s lacks rows=%d that were not removed, which are put there again", self._link.where, len(lost)
            )
            await self._seed(era, lost)
            era, rev, known = await self._held_there()
        if known != self._local():
            self._apply(known)
        self._known, self._era, self._rev = known, era, rev

    async def _held_there(self) -> tuple[str, str, dict[str, Rows]]:
        """Redis's life, the revision, and the rows. Raises RedisAway."""
        found = await self._link.together(
            ("HMGET", self._link.key("meta"), "era", "rev"),
            *(("HGETALL", self._link.key("rows", table)) for table in OPERATOR_TABLES),
        )
        (era, rev), *tables = found
        if era is None:
            raise RedisAway(f"Redis at {self._link.where} was emptied, and is being filled again")
        known = {table: _rows(rows) for table, rows in zip(OPERATOR_TABLES, tables, strict=True)}
        return era.decode(), (rev or b"0").decode(), known

    async def _removed(self) -> dict[str, set[str]]:
        """Names of rows that operators removed. Raises RedisAway."""
        gone = await self._link.together(*(("HKEYS", self._link.key("gone", table)) for table in OPERATOR_TABLES))
        return {table: {name.decode() for name in names} for table, names in zip(OPERATOR_TABLES, gone, strict=True)}

    def _lacks(self, known: dict[str, Rows]) -> bool:
        """Whether something that is here is not there."""
        return any(rows.keys() - known[table].keys() for table, rows in self._local().items())

    def _lost(self, known: dict[str, Rows], removed: dict[str, set[str]]) -> list[tuple[str, str, bytes]]:
        """Table, name and row of what is here, is not there and was not removed: Redis evicted it, or never had it."""
        return [
            (table, name, row)
            for table, rows in self._local().items()
            for name, row in rows.items()
            if name not in known[table] and name not in removed[table]
        ]

    async def _reread(self) -> None:
        self._apply(self._known)  # what was changed here alone is not to be put there
        with suppress(RedisAway):
            await self._read()

    async def _put_there(self, era: str) -> None:
        rows = [(table, name, row) for table, rows in self._local().items() for name, row in rows.items()]
        if rows:
            added = await self._seed(era, rows)
            log.info("redis %s era=%s rows put there=%s", self._link.where, era, added)

    async def _seed(self, era: str, rows: Sequence[tuple[str, str, bytes]]) -> int:
        """Add what is not there and was not removed; how many that were, -1 for another life of Redis."""
        words: list[str | bytes] = [era]
        for table, name, row in rows:
            words += [str(OPERATOR_TABLES.index(table) + 1), name, row]
        return int(await self._link.script(SEED, self._keys(), words))

    async def _write(self, changes: list[tuple[int, str, bytes]]) -> bool:
        words: list[str | bytes] = [self._era or "", self._rev]
        for number, name, row in changes:
            words += [str(number), name, row]
        rev = int(await self._link.script(WRITE, self._keys(), words))
        if rev < 0:
            return False
        self._rev = str(rev)
        return True

    def _keys(self) -> list[str]:
        tables = [self._link.key(kind, table) for kind in ("rows", "gone") for table in OPERATOR_TABLES]
        return [self._link.key("meta"), self._link.key("news"), *tables]

    def _changes(self) -> list[tuple[int, str, bytes]]:
        found = []
        local = self._local()
        for number, table in enumerate(OPERATOR_TABLES, start=1):
            mine, known = local[table], self._known.get(table, {})
            found += [(number, name, row) for name, row in mine.items() if known.get(name) != row]
            found += [(number, name, b"") for name in known if name not in mine]
        return found

    def _local(self) -> dict[str, Rows]:
        return {
            table: {str(next(iter(row.values()))): msgspec.msgpack.encode(row) for row in self._state.rows(table)}
            for table in OPERATOR_TABLES
        }

    def _apply(self, known: dict[str, Rows]) -> None:
        for table in OPERATOR_TABLES:
            rows = [msgspec.msgpack.decode(row) for row in known.get(table, {}).values()]
            self._state.replace_rows(table, rows)
        for reload in self._reload:
            reload()
        self._tell_held()

    def _tell_held(self) -> None:
        for told in self._held:
            told()


def _rows(flat: object) -> Rows:
    """Of an HGETALL, as a mapping or as a flat list."""
    if isinstance(flat, list):
        flat = dict(zip(flat[::2], flat[1::2], strict=True))
    assert isinstance(flat, dict)
    return {name.decode(): bytes(row) for name, row in flat.items()}


def _refused(why: str) -> ApiError:
    text = f"what gateways share cannot be changed now: {why}; requests are served meanwhile"
    return ApiError(503, text, code="redis_unavailable", retry_after_s=1)
