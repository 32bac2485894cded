"""Which gateways there are, by their leases in Redis, and which of them leads."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from time import monotonic, time

import msgspec

from gateway.shared.common import Common
from gateway.shared.link import RedisAway, RedisLink
from gateway.shared.scripts import BEAT, LEAVE

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""At most so long between beats."""
LEASE_S = 2.5
"""How long a gateway that says nothing is taken for alive, and its lead for its own, by Redis's clock."""
SURE_S = 2.0
"""How long after it asked a gateway that was told that it leads is sure of that, by its own clock."""
LOOK_S = 0.01
"""How often it is looked whether a change holds everywhere."""


class Replica(msgspec.Struct, frozen=True):
    """A gateway. ``url`` is where nodes reach it.

    ``follows`` is what it has made its own of what operators say: Redis's life and the revision, "" for nothing yet;
    None where it does not say so, as older ones do. Nor do these say what they have in ``common``.
    """

    id: str
    url: str
    follows: str | None = None
    common: Common | None = None

    def holds(self, era: str, rev: int) -> bool:
        """Whether this revision holds there, as far as it says."""
        if self.follows is None:
            return True
        its_era, _, its_rev = self.follows.partition(" ")
        return its_era == era and int(its_rev) >= rev


class Beat(msgspec.Struct, frozen=True):
    """What Redis said to one: its present life and revision of rows, and the leader's threshold."""

    era: str
    rev: str
    threshold: str


class Roster:
    """``beat`` is called twice a second; ``least_term`` tells the highest term that anybody here has heard of."""

    def __init__(
        self, link: RedisLink, me: Replica, least_term: Callable[[], int], clock: Callable[[], float] = monotonic
    ) -> None:
        self.me = me
        self.replicas: tuple[Replica, ...] = (me,)
        """All that lived at the last beat that was answered; this one among them."""
        self.stands = True
        """Whether this gateway would lead."""
        self.own_term = 0
        """The term of this gateway's last lead; 0 for one that never led."""
        self.leader = ""
        self.term = 0
        self._link = link
        self._least_term = least_term
        self._clock = clock
        self.ahead_s = 0.0
        """How far the clock here was ahead of Redis's at the last beat."""
        self._sure_till = float("-inf")

    def leads(self, now: float) -> bool:
        """Whether this gateway certainly leads."""
        return now < self._sure_till

    @property
    def leader_url(self) -> str:
        """Where the leader is reached; "" where none is known."""
        return next((replica.url for replica in self.replicas if replica.id == self.leader), "")

    @property
    def siblings(self) -> tuple[str, ...]:
        """Where the others are reached."""
        return tuple(sorted(replica.url for replica in self.replicas if replica.id != self.me.id))

    async def beat(self, threshold: str) -> Beat:
        """Say that this gateway lives and what threshold it would set, hear of the others. Raises RedisAway."""
        asked, wall = self._clock(), time()
        keys = [self._link.key("replicas"), self._link.key("meta")]
        fresh = secrets.token_hex(8)
        record = msgspec.json.encode(self.me)
        term = max(self.term, self.own_term, self._least_term())
        said = threshold if self.leads(asked) else ""
        values: list[str | bytes | int] = [self.me.id, record, int(LEASE_S * 1000), term, fresh, said, int(self.stands)]
        found = await self._link.script(BEAT, keys, values)
        try:
            era, rev, leader, term, in_force, live, now = found
            self.ahead_s = (wall + time()) / 2 - now / 1000
            self.replicas = tuple(msgspec.json.decode(one, type=Replica) for one in live[1::2])
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise RedisAway(f"Redis at {self._link.where}: what lies under this prefix is no gateway's") from error
        self._took(leader.decode(), int(term), asked)
        return Beat(era.decode(), rev.decode(), in_force.decode())

    async def settled(self, era: str, rev: int) -> bool:
        """Return when a revision holds on all that are alive; False where one said nothing for as long as it may live.

        One that is gone counts until its lease is over. Raises RedisAway.
        """
        end = self._clock() + LEASE_S + BEAT_S
        while self._clock() < end:
            (seconds, micros), found = await self._link.together(("TIME",), ("HGETALL", self._link.key("replicas")))
            now = int(seconds) * 1000 + int(micros) // 1000
            try:
                others = [one for one in _alive(found, now) if one.id != self.me.id]
                if all(one.holds(era, rev) for one in others):
                    return True
            except (ValueError, msgspec.MsgspecError) as error:
                raise RedisAway(f"Redis at {self._link.where}: what lies under this prefix is no gateway's") from error
            await asyncio.sleep(LOOK_S)
        return False

    async def leave(self) -> None:
        """This gateway goes in order. Raises RedisAway."""
        self._sure_till = float("-inf")
        await self._link.script(LEAVE, [self._link.key("replicas"), self._link.key("meta")], [self.me.id])

    def _took(self, leader: str, term: int, asked: float) -> None:
        if (leader, term) != (self.leader, self.term):
            log.info("leader=%s term=%d me=%s", leader or "none", term, self.me.id)
        self.leader, self.term = leader, term
        if leader == self.me.id:
            self.own_term = term
            self._sure_till = asked + SURE_S
        else:
            self._sure_till = float("-inf")


def _alive(found: object, now: int) -> list[Replica]:
    """Of an HGETALL of replicas, as a mapping or a flat list: those whose lease runs at ``now``, in Redis's ms."""
    records = found.values() if isinstance(found, dict) else found[1::2] if isinstance(found, list) else ()
    pairs = (bytes(record).split(b" ", 1) for record in records)
    return [msgspec.json.decode(record, type=Replica) for till, record in pairs if int(till) >= now]
