"""A gateway among several that share a Redis: what it asks and tells there, twice a second, in the background."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import msgspec

from gateway.shared.audits import SharedAudit
from gateway.shared.common import Common, differences
from gateway.shared.leading import TERM_BITS, SharedLeadership
from gateway.shared.link import RedisAway, RedisLink
from gateway.shared.records import SharedRecords
from gateway.shared.roster import BEAT_S, Replica, Roster
from gateway.shared.rows import SharedRows
from gateway.shared.settings import RedisSettings
from gateway.shared.sharing import Parts
from gateway.shared.slices import Slices
from gateway.shared.spending import Spending
from gateway.state import State
from kvcache.background import in_background
from scheduler.controller.observation import Spoken

log = logging.getLogger(__name__)

NEWS_S = 0.25
"""How long one call waits for news: a busy process has the rest of a call's time to hear the answer."""


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """What went through one gateway since it last said so; ``begun`` of ``spoken`` are Unix seconds."""

    lengths: tuple[int, ...]
    spoken: tuple[Spoken, ...]


class Together:
    """``Sharing`` over Redis. Nothing here is waited for by a client's request."""

    def __init__(self, settings: RedisSettings, state: State) -> None:
        self.id = secrets.token_hex(8)
        self.link = RedisLink(settings)
        self._state = state
        self._parts: Parts | None = None
        self._roster = Roster(self.link, Replica(self.id, ""), self._least_term)
        self.leadership = SharedLeadership(self._roster, state.keep_role_epoch)
        self.slices = Slices(self.link, self.id, lambda: len(self._roster.replicas))
        self.spending = Spending(self.link, self.id)
        self.records = SharedRecords(self.link, self.id)
        self.audit = SharedAudit(self.link, self.id)
        self._rows = SharedRows(self.link, state)
        self._siblings: tuple[str, ...] = ()
        self._differences: list[str] = []
        self._led = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def trouble(self) -> str | None:
        """Redis is away, and what follows from that; or gateways do not belong together."""
        if self.link.up:
            return "; ".join(self._differences) or None
        limits = "an even share" if self.slices.degraded else "as last divided"
        return (
            f"Redis at {self.link.where} is away ({self.link.why}): requests are served, limits are {limits}, and "
            "operators' changes are refused"
        )

    @property
    def gateways(self) -> int:
        """How many there were at the last answer."""
        return len(self._roster.replicas)

    @property
    def clock_ahead_s(self) -> float:
        """How far the clock here was ahead of Redis's at the last answer."""
        return self._roster.ahead_s

    def start(self, url: str, parts: Parts) -> None:
        """Begin to beat."""
        self._roster.me = msgspec.structs.replace(self._roster.me, url=url)
        self._parts = parts
        self._rows.tell(*parts.reload)
        self._rows.when_held(parts.keys_held)
        parts.audit.on_added = self.audit.added
        parts.decisions.on_added = self.records.decided
        parts.history.on_kept = self.records.logged
        for work in (self._beats(parts), self.slices.run()):
            self._begin(work)

    async def stop(self) -> None:
        """Say goodbye, so that nobody waits for this gateway's lease to end."""
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        with suppress(RedisAway):
            await self._roster.leave()
            await self.records.flush()
            await self.audit.flush()
        await self.link.close()

    def step_down(self) -> None:
        """From the next beat on another gateway may lead."""
        self._roster.stands = False

    def writing(self) -> AbstractAsyncContextManager[None]:
        """As ``SharedRows.writing``, and what was changed holds on every gateway that lives when it ends."""
        return self._writing()

    def pass_on(self, lengths: Sequence[int], spoken: Sequence[Spoken]) -> None:
        """For the leader, by the wall clock."""
        if lengths or spoken:
            self.records.passed(msgspec.msgpack.encode(Traffic(tuple(lengths), _moved(spoken, _offset()))))

    async def find_decision(self, name: str) -> dict[str, Any] | None:
        """Whichever gateway made it."""
        with suppress(RedisAway):
            return await self.records.find(name)
        return None

    async def recent_decisions(self, limit: int) -> list[dict[str, Any]]:
        """Of all gateways."""
        with suppress(RedisAway):
            return await self.records.recent(limit)
        return []

    def view(self) -> dict[str, Any]:
        """Who there is, who leads, and how Redis is."""
        leader = self._roster.leader
        listed = [{"id": one.id, "url": one.url, "leads": one.id == leader} for one in self._roster.replicas]
        redis = {"up": self.link.up, "where": self.link.where, "why": self.link.why or None}
        return {"gateway": self.id, "leads": self.leadership.leads, "gateways": listed, "redis": redis}

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        before = self._rows.follows
        async with self._rows.writing():
            yield
        follows = self._rows.follows
        if follows is not None and follows != before:
            with suppress(RedisAway):  # it is taken; who cannot be asked cannot be waited for
                if not await self._roster.settled(*follows):
                    log.warning("a gateway does not follow what operators say rev=%d", follows[1])

    # ---- in the background

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(in_background(work, log, "what gateways share is not followed any more"))

    def _least_term(self) -> int:
        """Nodes obey none below it."""
        epoch = self._state.role_epoch()
        if self._parts is not None:
            epoch = max(epoch, self._parts.role_epoch())
        return epoch >> TERM_BITS

    async def _beats(self, parts: Parts) -> None:
        while True:
            told, heard = self._rows.follows, None
            try:
                heard = await self._beat(parts)
            except RedisAway as away:
                log.debug("no beat: %s", away)  # the link says once that it is away
            except Exception:
                log.exception("what gateways share could not be followed")
            self._lead(parts)
            if heard is None:
                await asyncio.sleep(BEAT_S)
            elif self._rows.follows == told:  # else whoever made the change waits to hear that it holds here
                await self._pause(heard)

    async def _pause(self, rev: str) -> None:
        """Until the next beat is due, or another gateway changes something."""
        loop = asyncio.get_running_loop()
        due = loop.time() + BEAT_S
        try:
            while (left := due - loop.time()) > 0 and not await self._rows.news(rev, min(left, NEWS_S)):
                pass
        except RedisAway:
            await asyncio.sleep(due - loop.time())

    async def _beat(self, parts: Parts) -> str:
        """Say and hear what there is; the revision that others have."""
        threshold, follows = parts.threshold, self._rows.follows
        said = "" if follows is None else "{} {}".format(*follows)
        common = parts.common()
        self._roster.me = msgspec.structs.replace(self._roster.me, follows=said, common=common)
        beat = await self._roster.beat(f"{threshold.tokens} {threshold.reason}")
        self._tell_siblings(parts)
        self._compare(common)
        await self._rows.follow(beat.era, beat.rev)
        for entry in await self.records.entries(beat.era):
            parts.history.take(entry.kind, entry.key, entry.row)
            parts.conversions.elsewhere(entry.kind, entry.row)
        parts.conversions.mark()
        await self.audit.take(beat.era, parts.audit)
        if self.leadership.leads:
            for data in await self.records.take_traffic():
                traffic = msgspec.msgpack.decode(data, type=Traffic)
                parts.meter.heard(traffic.lengths, _moved(traffic.spoken, -_offset()))
        else:
            _adopt(threshold, beat.threshold)
        await self.records.flush()
        await self.audit.flush()
        return beat.rev

    def _lead(self, parts: Parts) -> None:
        """Begin to lead, or stop: what another leader left in the middle ends, and what this one has under way."""
        leads = self.leadership.leads
        if leads and not self._led:
            parts.conversions.took_over()
        elif self._led and not leads and self._roster.leader not in ("", self.id):
            parts.conversions.abandon()
        if leads or self._roster.leader not in ("", self.id):
            self._led = leads

    def _compare(self, mine: Common) -> None:
        roster = self._roster
        others = [(one.url, one.common) for one in roster.replicas if one.id != self.id]
        found = differences(mine, others, roster.ahead_s)
        if len(found) > len(self._differences):
            log.warning("%s", "; ".join(found))
        self._differences = found

    def _tell_siblings(self, parts: Parts) -> None:
        siblings = self._roster.siblings
        if siblings != self._siblings:
            self._siblings = siblings
            parts.siblings(siblings)


def _adopt(threshold: Any, said: str) -> None:
    """Heed what the leader has found."""
    tokens, _, reason = said.partition(" ")
    if tokens.isdigit():
        threshold.tokens, threshold.reason = int(tokens), reason


def _offset() -> float:
    """From the controller's clock to Unix time."""
    return time.time() - time.monotonic()


def _moved(spoken: Sequence[Spoken], by: float) -> tuple[Spoken, ...]:
    return tuple(Spoken(one.begun + by, one.tokens, one.ends) for one in spoken)


async def take_first(settings: RedisSettings, state: State) -> None:
    """Before a gateway serves: bring its state up to what the others have. Raises RedisAway."""
    link = RedisLink(settings)
    try:
        await SharedRows(link, state).first()
    finally:
        await link.close()
