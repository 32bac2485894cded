"""Limits over gateways: never more than one of them alone would allow, and all of it where it is asked for."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from gateway.shared import slices as module
from gateway.shared.slices import Slices
from scheduler.admission.limits import BURST_S, Limits, Usage

HOLDER = ("key", "k")


class Door:
    """One gateway's side of one key."""

    def __init__(self, link, name, limits, gateways=2):
        self.slices = Slices(link, name, lambda: gateways)
        self.limits = limits
        self.usage = Usage(limits, self.now)
        self.passed = 0

    @property
    def now(self):
        return asyncio.get_running_loop().time()

    async def ask(self, tokens=0):
        """Whether one request is let in, as admission asks."""
        await self.slices.before([(HOLDER, self.usage)])
        if self.usage.refusal(self.now) is not None:
            return False
        self.usage.begin(self.now)
        if tokens:
            if self.usage.token_refusal(tokens, self.now) is not None:
                self.usage.end()
                return False
            self.usage.spend(tokens, self.now)
        self.passed += 1
        return True

    async def hammer(self, until, every_s=0.01, tokens=0):
        """Short requests, one after the other."""
        while self.now < until:
            if await self.ask(tokens):
                self.usage.end()
            await asyncio.sleep(every_s)


@asynccontextmanager
async def doors(link, limits, count=2):
    found = [Door(link(), f"g{n}", limits, count) for n in range(count)]
    for door in found:
        await door.slices._link.command("PING")
    tasks = [asyncio.create_task(door.slices.run()) for door in found]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("tokens", [0, 3])
async def test_both_together_let_in_what_one_alone_would(link, tokens):
    limits = Limits(requests_per_minute=3000) if not tokens else Limits(tokens_per_minute=3000 * tokens)
    async with doors(link, limits) as (a, b):
        began = a.now
        await asyncio.gather(*(door.hammer(began + 3.0, tokens=tokens) for door in (a, b) for _ in range(2)))
        most = 3000 / 60 * (3.0 + BURST_S)
        assert (a.passed + b.passed) <= most * 1.02
        shares = [door.usage.slice.requests if not tokens else door.usage.slice.tokens for door in (a, b)]
        assert 0.95 < sum(shares) <= 1.0 + 1e-9
        assert min(shares) > 0.4


async def test_what_one_does_not_need_the_other_may_use(link):
    async with doors(link, Limits(requests_per_minute=3000)) as (a, b):
        began = a.now
        assert await b.ask()
        b.usage.end()
        for _ in range(5):  # a's slice grows, as b needs little
            await a.hammer(a.now + 1.5)
            if a.usage.slice.requests > 0.85:
                break
        assert a.usage.slice.requests > 0.85
        await a.hammer(a.now + 1.5, every_s=0.004)
        assert a.passed <= 1.02 * 50 * (a.now - began + BURST_S)


async def test_requests_at_once_are_never_more_than_allowed_and_a_free_one_is_found(link):
    async with doors(link, Limits(concurrency=5)) as (a, b):
        held = [await door.ask() for door in (a, b) for _ in range(6)]
        assert sum(held) <= 5
        await asyncio.sleep(2.5 * module.TICK_S)
        late = [await door.ask() for door in (a, b) for _ in range(6)]
        assert sum(held) + sum(late) == 5
        while a.usage.running:
            a.usage.end()
        await asyncio.sleep(0.5)
        for _ in range(40):
            if b.usage.running == 5 or not await b.ask():
                await asyncio.sleep(0.05)
        assert b.usage.running == 5


async def test_the_slots_of_a_dead_gateway_come_back_when_its_lease_ends(link, monkeypatch):
    monkeypatch.setattr(module, "TTL_S", 0.5)
    monkeypatch.setattr(module, "ASK_S", 2.0)
    async with doors(link, Limits(concurrency=2), 1) as (b,):
        dead = Door(link(), "dead", Limits(concurrency=2), 2)
        await dead.slices._link.command("PING")
        assert await dead.ask()
        assert await dead.ask()
        assert not await b.ask()
        await asyncio.sleep(0.8)
        assert await b.ask()


async def test_a_single_request_is_let_in_at_each_gateway_where_the_limit_is_tiny(link):
    async with doors(link, Limits(requests_per_minute=10)) as (a, b):
        assert await a.ask()
        assert (await b.ask()) in (True, False)
        assert not await a.ask()
        assert a.passed + b.passed <= 2


async def test_a_quiet_key_gives_back_and_begins_anew(link, monkeypatch):
    monkeypatch.setattr(module, "QUIET_S", 0.2)
    monkeypatch.setattr(module, "ASK_S", 2.0)  # however busy the machine is
    async with doors(link, Limits(concurrency=2)) as (a, b):
        assert await a.ask()
        a.usage.end()
        await asyncio.sleep(0.8)
        assert len(a.slices) == 0
        assert await b.ask()
        assert await b.ask()


async def test_without_redis_last_slices_hold_and_then_an_even_share(redis, link, monkeypatch):
    monkeypatch.setattr(module, "LAPSE_S", 0.3)
    async with doors(link, Limits(requests_per_minute=3000, concurrency=7)) as (a, b):
        await a.hammer(a.now + 1.0)
        redis.stall()
        try:
            assert a.usage.slice.requests > 0.5
            while not (a.slices.degraded):
                assert a.usage.slice.requests > 0.5
                await asyncio.sleep(0.02)
            assert (a.usage.slice.requests, a.usage.slice.slots) == (0.5, 3)
            began = a.now
            assert await b.ask()  # nobody waits for long
            assert a.now - began < 0.5
            assert b.usage.slice.requests == 0.5
        finally:
            redis.go_on()
        while a.slices.degraded:  # noqa: ASYNC110 (it polls state that has no event)
            await asyncio.sleep(0.02)
        await a.hammer(a.now + 1.0)
        assert a.usage.slice.requests > 0.5
