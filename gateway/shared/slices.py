"""Limits over several gateways: each lets requests in from slices that it leases, so no request asks Redis on its way.

Slices follow what is asked of each gateway, five times a second. Only a request that finds nothing in the slice, or the
first one of a key that was quiet, waits for an answer, and not for long. While Redis is away the last slices hold for
as long as others take this gateway for alive; then each has an even share.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from time import monotonic

from gateway.shared.link import RedisAway, RedisLink
from gateway.shared.scripts import SLICE
from scheduler.admission.limits import MINUTE_S, Slice, Usage

log = logging.getLogger(__name__)

Holder = tuple[str, str]
"""``key`` or ``tenant``, and which."""

TICK_S = 0.2
ASK_S = 0.1
"""How long a request may wait to hear what its key may use."""
AGAIN_S = 0.05
"""How soon a slice that is used up is asked for again."""
QUIET_S = 5.0
"""A holder from whom nothing came for so long gives back what it leased."""
TTL_S = 3.0
"""How long slices of a gateway that says nothing are left to it."""
LAPSE_S = 2.5
RATE_S = 4.0
"""Over about so long what is asked of a rate is averaged: what comes in bursts must not move slices to and fro."""
SLOTS_S = 0.5
"""How long slots that were in use are still counted as needed."""
AT_ONCE = 64


@dataclass(slots=True)
class _Lease:
    usage: Usage
    since: float
    looked_at: float
    asked_at: float
    leased: bool = False
    renewal: asyncio.Task[None] | None = None
    requests: float = 0.0
    tokens: float = 0.0
    slots: float = 0.0


class Slices:
    """``gateways`` tells how many share the limits. All but ``run`` is called on the event loop and returns soon."""

    def __init__(
        self, link: RedisLink, me: str, gateways: Callable[[], int], clock: Callable[[], float] = monotonic
    ) -> None:
        self._link = link
        self._me = me
        self._gateways = gateways
        self._clock = clock
        self._leases: dict[Holder, _Lease] = {}
        self._answered_at = clock()
        self.degraded = False
        """Whether every limit is an even share now, for want of an answer."""

    def __len__(self) -> int:
        return len(self._leases)

    async def before(self, holders: Sequence[tuple[Holder, Usage]]) -> None:
        """Make sure of slices for these before they are asked: at once, but for whom nothing is left or known."""
        now, renewals = self._clock(), set()
        for holder, usage in holders:
            lease = self._leases.get(holder)
            if lease is None or lease.usage is not usage:
                lease = self._leases[holder] = _Lease(usage, now, now, float("-inf"))
                usage.lease(self.even(usage), now)
            lease.looked_at = now
            if self._link.up and (not lease.leased or usage.exhausted(now)):
                if lease.renewal is None or lease.renewal.done():
                    lease.renewal = asyncio.create_task(self._renewed(holder, lease))
                renewals.add(lease.renewal)
        if renewals:
            await asyncio.wait(renewals, timeout=ASK_S)

    def even(self, usage: Usage) -> Slice:
        """What each gateway may use where nobody can divide: as much as the others, and one request at once."""
        count = max(1, self._gateways())
        most = usage.limits.concurrency
        return Slice(1 / count, 1 / count, None if most is None else max(1, most // count))

    async def run(self) -> None:
        """Renew slices until cancelled."""
        try:
            await self._ticks()
        finally:
            for lease in self._leases.values():
                if lease.renewal is not None:
                    lease.renewal.cancel()

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            quiet = [h for h, lease in self._leases.items() if self._quiet(lease, now)]
            holders = list(self._leases)
            for at in range(0, len(holders), AT_ONCE):
                await self._asked(holders[at : at + AT_ONCE], quiet)
            for holder in quiet:
                lease = self._leases.get(holder)
                if lease is not None and self._quiet(lease, self._clock()):
                    del self._leases[holder]
            if not holders:
                self._answered_at = self._clock()
            self._lapse()

    async def _renewed(self, holder: Holder, lease: _Lease) -> None:
        """Ask for one holder, for all requests that wait for it, and not more often than it makes sense."""
        await asyncio.sleep(max(0.0, lease.asked_at + AGAIN_S - self._clock()))
        await self._asked([holder])

    def _quiet(self, lease: _Lease, now: float) -> bool:
        return now - lease.looked_at > QUIET_S and lease.usage.unused(now)

    async def _asked(self, holders: Sequence[Holder], back: Sequence[Holder] = ()) -> None:
        now = self._clock()
        leases = [(holder, lease) for holder in holders if (lease := self._leases.get(holder)) is not None]
        values: list[str | int | float] = [self._me, int(TTL_S * 1000), max(1, self._gateways())]
        for holder, lease in leases:
            values += [*self._demand(lease, now), int(holder in back)]
        keys = [self._link.key("slice", *holder) for holder, _ in leases]
        try:
            answers = await self._link.script(SLICE, keys, values)
        except RedisAway as away:
            log.debug("no slices: %s", away)
            return
        now = self._answered_at = self._clock()
        for (holder, lease), (requests, tokens, slots) in zip(leases, answers, strict=True):
            if holder in back:
                lease.leased = False
                continue
            most = lease.usage.limits.concurrency
            of = Slice(float(requests), float(tokens), None if most is None else int(slots))
            if lease.leased:
                lease.usage.lease(of, now)
            else:
                lease.usage.first_lease(of, now)
            lease.leased = True

    def _demand(self, lease: _Lease, now: float) -> tuple[float, float, int, int, int]:
        """What the script takes of one holder."""
        limits, asked = lease.usage.limits, lease.usage.demand()
        passed = 0.0 if lease.asked_at == float("-inf") else now - lease.asked_at
        lease.asked_at = now
        keep = exp(-passed / min(RATE_S, max(TICK_S, now - lease.since)))

        def share(before: float, count: float, a_minute: int | None) -> float:
            if a_minute is None:
                return -1.0
            rate = count / passed / (a_minute / MINUTE_S) if passed else 0.0
            return min(1.0, max(0.0, before) * keep + rate * (1 - keep))

        lease.requests = share(lease.requests, asked.requests, limits.requests_per_minute)
        lease.tokens = share(lease.tokens, asked.tokens, limits.tokens_per_minute)
        most = limits.concurrency
        lease.slots = 0.0 if most is None else min(float(most), max(asked.slots, lease.slots * exp(-passed / SLOTS_S)))
        running = 0 if most is None else lease.usage.running
        return lease.requests, lease.tokens, -1 if most is None else most, max(running, round(lease.slots)), running

    def _lapse(self) -> None:
        """Go over to even shares where nobody divided the limits for too long, and come back."""
        away = self._clock() - self._answered_at > LAPSE_S
        if away != self.degraded:
            log.warning("limits are %s", "an even share: Redis does not divide them" if away else "divided again")
        self.degraded = away
        if away:
            now = self._clock()
            for lease in self._leases.values():
                lease.usage.lease(self.even(lease.usage), now)
