"""A key's budget of tokens is one over all gateways: none is counted twice or forgotten, whatever Redis does."""

import asyncio

import pytest

from gateway import budgets as module
from gateway.budgets import Budgets
from gateway.errors import ApiError
from gateway.keys import Principal
from gateway.keys import Role as KeyRole
from gateway.shared.link import RedisAway
from gateway.shared.spending import Spending
from gateway.state import State
from gateway.terms import KeyLimits

CLIENT = Principal("c", KeyRole.CLIENT, False, limits=KeyLimits(token_budget=100), key_id="k")


@pytest.fixture
def two(link, monkeypatch):
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    found = [Budgets(State(None), Spending(link(), name)) for name in ("a", "b")]
    yield found
    for one in found:
        one.close()


async def told(*budgets):
    """What was spent is in Redis, as after a quarter of a second."""
    for one in budgets:
        await one.hear(["k"])
        await one._ask(["k"])


async def test_what_is_spent_at_one_gateway_is_spent_at_the_other(two):
    a, b = two
    a.spend(CLIENT, 60)
    await told(a, b)
    b.check(CLIENT)
    b.spend(CLIENT, 50)
    with pytest.raises(ApiError, match="110 tokens of its budget of 100"):
        b.check(CLIENT)
    await told(b, a)
    with pytest.raises(ApiError, match="110 tokens"):
        a.check(CLIENT)


async def test_a_request_of_a_key_that_was_quiet_here_hears_first_what_was_used_elsewhere(two):
    a, b = two
    a.spend(CLIENT, 100)
    await told(a)
    await b._spending._link.command("PING")
    await b.prepare(CLIENT)
    with pytest.raises(ApiError, match="budget"):
        b.check(CLIENT)


async def test_what_is_spent_is_told_by_itself_and_before_a_gateway_ends(two, monkeypatch):
    monkeypatch.setattr(module, "TELL_EVERY_S", 0.01)
    a, b = two
    await a._spending._link.command("PING")
    a.spend(CLIENT, 5)
    for _ in range(200):
        await asyncio.sleep(0.01)
        if not a._unwritten:
            break
    await told(b)
    assert b.spent("k") == 5
    monkeypatch.setattr(module, "TELL_EVERY_S", 60.0)
    a._due = None
    a.spend(CLIENT, 6)
    await a.stop()
    await told(b)
    assert b.spent("k") == 11


async def test_a_redis_that_was_emptied_is_told_what_gateways_know(redis, two):
    a, b = two
    a.spend(CLIENT, 30)
    await told(a, b)
    redis.say("FLUSHALL")
    b.spend(CLIENT, 4)
    await told(b, a)
    assert (a.spent("k"), b.spent("k")) == (34, 34)


async def test_an_exchange_whose_answer_was_lost_adds_nothing_twice(two, monkeypatch):
    a, b = two
    spending, exchange = a._spending, a._spending.exchange

    async def unheard(*said):
        await exchange(*said)
        raise RedisAway("lost")

    a.spend(CLIENT, 10)
    monkeypatch.setattr(spending, "exchange", unheard)
    for more in (1, 2, 3):
        await a._ask(["k"])
        a.spend(CLIENT, more)
    monkeypatch.setattr(spending, "exchange", exchange)
    assert a.spent("k") == 16
    await told(a, b)
    assert (a.spent("k"), b.spent("k")) == (16, 16)


async def test_without_redis_each_counts_on_and_tells_afterwards(redis, two):
    a, b = two
    a.spend(CLIENT, 10)
    await told(a, b)
    redis.kill()
    try:
        a.spend(CLIENT, 20)
        b.spend(CLIENT, 30)
        await told(a, b)
        assert (a.spent("k"), b.spent("k")) == (30, 40)
    finally:
        redis.restart()
    await told(a, b, a)
    assert (a.spent("k"), b.spent("k")) == (60, 60)


async def test_what_was_spent_outlives_the_gateway_and_its_redis(redis, link, tmp_path):
    before = Budgets(State(tmp_path / "state"), Spending(link(), "a"))
    before.spend(CLIENT, 10)
    await told(before)
    before.spend(CLIENT, 5)
    before.close()
    redis.say("FLUSHALL")
    after = Budgets(State(tmp_path / "state"), Spending(link(), "b"))
    await told(after)
    assert after.spent("k") == 15
    after.close()


async def test_a_key_that_is_gone_leaves_nothing_behind(redis, two):
    a, b = two
    a.spend(CLIENT, 10)
    await told(a, b)
    a.keep_only(["other"])
    await a.stop()
    assert redis.say("HGETALL", "{prfaas}:spent") == b"*0\r\n"
    assert a._state.execute("SELECT * FROM counters") == []
    assert a.spent("k") == 0
    b.keep_only(["k"])
    assert b.spent("k") == 10


async def test_more_keys_than_go_at_once_are_told_all(two, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 3)
    a, b = two
    keys = [f"k{n}" for n in range(10)]
    for key_id in keys:
        a.spend(Principal("c", KeyRole.CLIENT, False, limits=CLIENT.limits, key_id=key_id), 7)
    await a._ask(keys)
    await b._ask(keys)
    assert [b.spent(key_id) for key_id in keys] == [7] * 10
