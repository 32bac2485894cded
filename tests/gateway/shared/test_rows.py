"""Keys, tenants and clusters are the same on every gateway, and survive a Redis that forgets."""

import asyncio

import pytest

from gateway.clusters import Dial
from gateway.errors import ApiError
from gateway.keys import KeyBook
from gateway.keys import Role as KeyRole
from gateway.registry import Registry
from gateway.shared.roster import Replica, Roster
from gateway.shared.rows import SharedRows
from gateway.state import State
from gateway.tenants import Tenants
from gateway.terms import TenantTerms
from kvcache.control import Join, KvAddress, ModelInfo
from kvcache.wire import Role


class One:
    """As much of a gateway as its rows need."""

    def __init__(self, link, model, name, state=None):
        self.link = link
        self.state = state or State(None)
        self.keys, self.tenants = KeyBook(self.state), Tenants(self.state)
        self.registry = Registry(self.state, "local", model.fingerprint, 100)
        self.rows = SharedRows(link, self.state, (self.keys.reload, self.tenants.reload, self.registry.reload))
        self.roster = Roster(link, Replica(name, f"http://{name}"), lambda: 0)

    async def beat(self):
        beat = await self.roster.beat("")
        await self.rows.follow(beat.era, beat.rev)


async def two(link, model):
    a, b = One(link(), model, "a"), One(link(), model, "b")
    await a.beat()
    await b.beat()
    return a, b


async def test_what_is_said_to_one_gateway_holds_on_the_other_at_its_next_beat(link, model):
    a, b = await two(link, model)
    async with a.rows.writing():
        key_id, secret = a.keys.create("ops", KeyRole.ADMIN)
        a.tenants.set("blue", TenantTerms(2.0))
        a.registry.register("east", Dial.IN)
    await b.beat()
    assert b.keys.find(secret).key_id == key_id
    assert b.tenants.of("blue").weight == 2.0
    assert b.registry.cluster("east").dial is Dial.IN
    async with b.rows.writing():
        b.keys.revoke(key_id)
        b.registry.set_draining("east", True)
    await a.beat()
    assert a.keys.find(secret) is None
    assert a.registry.cluster("east").state == "draining"


async def test_who_waits_for_news_is_woken_by_a_change_and_by_nothing_older(link, model):
    a, b = await two(link, model)
    await b.beat()
    _, rev = b.rows.follows
    waiting = asyncio.create_task(b.rows.news(str(rev), 0.9))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    async with a.rows.writing():
        a.registry.register("east", Dial.IN)
    began = asyncio.get_running_loop().time()
    assert await waiting
    assert asyncio.get_running_loop().time() - began < 0.5
    assert await b.rows.news(str(rev), 0.9)  # the change came before it was asked
    assert asyncio.get_running_loop().time() - began < 0.5


async def test_who_was_revoked_or_removed_at_one_gateway_is_dismissed_by_all(link, model):
    a, b = await two(link, model)
    async with a.rows.writing():
        for name in ("east", "west", "north"):
            a.registry.register(name, Dial.IN)
    await b.beat()
    nodes = {}
    for name in ("east", "west", "north"):
        info = ModelInfo("tiny", model.fingerprint.parts(), 100, 16, 512)
        join = Join(name, "i", name, Role.PREFILL, bytes(32), KvAddress("127.0.0.1", 1), info, "1", 4)
        nodes[name] = b.registry.admit(join, 0.0)
    async with a.rows.writing():
        a.registry.secure("east", a.registry.cluster("east").security.revoked())
        a.registry.remove("west")
    await b.beat()
    assert {name: node.lost for name, node in nodes.items()} == {
        "east": "credentials_revoked",
        "west": "cluster_removed",
        "north": None,
    }


async def test_a_change_is_made_on_what_is_newest(link, model):
    a, b = await two(link, model)
    async with a.rows.writing():
        a.registry.register("east", Dial.IN)
    with pytest.raises(ApiError, match="registered already"):
        async with b.rows.writing():
            b.registry.register("east", Dial.OUT)


async def test_two_that_change_at_the_same_time_do_not_undo_each_other(link, model):
    a, b = await two(link, model)
    with pytest.raises(ApiError) as refused:  # noqa: PT012 (the end of the block raises)
        async with a.rows.writing():
            a.tenants.set("mine", TenantTerms())
            async with b.rows.writing():
                b.tenants.set("theirs", TenantTerms())
    assert (refused.value.status, refused.value.code) == (409, "changed_meanwhile")
    assert list(a.tenants.all()) == ["theirs"]


async def test_rows_that_redis_lost_alone_are_put_there_again_and_those_removed_are_not(redis, link, model):
    a, b = await two(link, model)
    async with a.rows.writing():
        _, secret = a.keys.create("ops", KeyRole.ADMIN)
        removed, _ = a.keys.create("gone", KeyRole.CLIENT)
    await b.beat()
    async with a.rows.writing():
        a.keys.revoke(removed)
    redis.say("DEL", "{prfaas}:rows:keys")
    async with a.rows.writing():
        a.tenants.set("blue", TenantTerms())
    await b.beat()
    for one in (a, b, One(link(), model, "c")):
        await one.rows.first()
        assert [entry.principal.name for entry in one.keys.entries()] == ["ops"]
        assert one.keys.find(secret)


async def test_without_redis_a_change_is_refused_before_it_is_made(redis, link, model):
    a, _ = await two(link, model)
    redis.kill()
    try:
        began = asyncio.get_running_loop().time()
        with pytest.raises(ApiError) as refused:
            async with a.rows.writing():
                a.keys.create("late", KeyRole.CLIENT)
        assert asyncio.get_running_loop().time() - began < 3.0
        assert (refused.value.status, refused.value.code) == (503, "redis_unavailable")
        assert "Redis at redis://127.0.0.1" in refused.value.message
        assert len(a.keys) == 0
    finally:
        redis.restart()


async def test_a_change_that_redis_did_not_take_is_taken_back_here(redis, link, model):
    a, _ = await two(link, model)
    try:
        with pytest.raises(ApiError, match="Redis"):  # noqa: PT012 (the end of the block raises)
            async with a.rows.writing():
                a.keys.create("late", KeyRole.CLIENT)
                redis.kill()
        assert len(a.keys) == 0
    finally:
        redis.restart()


async def test_an_emptied_redis_gets_back_what_the_gateways_know(redis, link, model):
    a, b = await two(link, model)
    async with a.rows.writing():
        _, secret = a.keys.create("ops", KeyRole.ADMIN)
        gone, _ = a.keys.create("gone", KeyRole.CLIENT)
        a.registry.register("east", Dial.IN)
    async with a.rows.writing():
        a.keys.revoke(gone)
    await b.beat()
    redis.say("FLUSHALL")
    await b.beat()
    await a.beat()
    fresh = One(link(), model, "c")
    await fresh.beat()
    for one in (a, b, fresh):
        assert [entry.principal.name for entry in one.keys.entries()] == ["ops"]
        assert one.keys.find(secret) is not None
        assert one.registry.cluster("east")


async def test_a_gateway_brings_what_only_its_file_knows_but_not_what_was_removed(link, model, tmp_path):
    file = State(tmp_path / "state.db")
    for_all, revoked = (KeyBook(file).create(name, KeyRole.ADMIN) for name in ("brought", "revoked"))
    copy, away = tmp_path / "copy.db", tmp_path / "away.db"
    file.execute("VACUUM INTO ?", (str(copy),))
    file.execute("VACUUM INTO ?", (str(away),))
    a = One(link(), model, "a")
    await a.beat()
    late = One(link(), model, "late", file)
    await late.beat()
    await a.beat()
    assert a.keys.find(for_all[1]) is not None
    async with a.rows.writing():
        a.keys.revoke(revoked[0])
    again = One(link(), model, "again", State(copy))  # it had not heard of that
    await again.rows.first()
    assert again.keys.find(revoked[1]) is None
    unmet = One(link(), model, "unmet", State(away))  # nor had this one, which could not ask when it started
    for one in (again, unmet, a):
        await one.beat()
        assert one.keys.find(revoked[1]) is None
        assert one.keys.find(for_all[1]) is not None
        one.state.close()
    file.close()
