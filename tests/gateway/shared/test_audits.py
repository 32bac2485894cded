"""Each entry of an audit log is in those of all gateways, once, whatever ended in between."""

import pytest

from gateway.audit import AuditEntry, AuditLog
from gateway.shared import audits as module
from gateway.shared.audits import SharedAudit
from gateway.shared.link import RedisAway
from gateway.state import State


class One:
    def __init__(self, link, name, state=None):
        self.log = AuditLog(state or State(None))
        self.shared = SharedAudit(link, name)
        self.log.on_added = self.shared.added

    def says(self, *actors):
        for number, actor in enumerate(actors):
            self.log.add(AuditEntry(1.0 + number, actor, "POST /v1/x", "", "200"))

    async def beat(self, era="e"):
        await self.shared.take(era, self.log)
        await self.shared.flush()

    @property
    def told(self):
        return sorted(entry.actor for entry in self.log.recent(1000))


async def test_entries_are_everywhere_once(link):
    a, b = One(link(), "a"), One(link(), "b")
    a.says("x", "y")
    b.says("z")
    for one in (a, b, a, b):
        await one.beat()
    assert a.told == b.told == ["x", "y", "z"]


async def test_who_comes_back_goes_on_where_it_was_and_hears_nothing_twice(link, tmp_path):
    a, b = One(link(), "a"), One(link(), "b", State(tmp_path / "b"))
    a.says("x")
    await a.beat()
    await b.beat()
    b.says("own")
    await b.beat()  # it ends before it sees its own entry in Redis
    a.says("y")
    await a.beat()
    again = One(link(), "c", State(tmp_path / "b"))
    await again.beat()
    assert again.told == ["own", "x", "y"]


async def test_a_redis_that_was_emptied_is_read_from_its_beginning(redis, link):
    a, b = One(link(), "a"), One(link(), "b")
    a.says("x")
    await a.beat()
    await b.beat()
    b.shared._last += 10 << 40  # as of a clock that was ahead
    redis.say("FLUSHALL")
    a.says("y")
    await a.beat("new")
    await b.beat("new")
    assert b.told == ["x", "y"]


async def test_without_redis_entries_wait_and_beyond_a_bound_are_counted(redis, link, monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    a, b = One(link(), "a"), One(link(), "b")
    redis.kill()
    try:
        a.says(*"abcde")
        with pytest.raises(RedisAway):
            await a.shared.flush()
    finally:
        redis.restart()
    assert a.shared.lost == 2
    await a.beat()
    await b.beat()
    assert b.told == ["a", "b", "c"]
    assert a.told == ["a", "b", "c", "d", "e"]


async def test_what_is_no_entry_is_left_out(link):
    a, b = One(link(), "a"), One(link(), "b")
    a.shared.added("x", "", b"no JSON")
    a.says("y")
    await a.beat()
    await b.beat()
    assert b.told == ["y"]
