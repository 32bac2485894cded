"""Who there is and who leads: one at a time, sure of it for less than its lease, with epochs that only rise."""

import asyncio

import pytest

from gateway.errors import ApiError
from gateway.shared import roster as module
from gateway.shared.leading import TERM_BITS, SharedLeadership
from gateway.shared.link import RedisAway
from gateway.shared.roster import SURE_S, Replica, Roster


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def one(link, name, clock=None, least=0):
    clock = clock or Clock()
    roster = Roster(link, Replica(name, f"http://{name}"), lambda: least, clock)
    return roster, SharedLeadership(roster, lambda epoch: None, clock), clock


async def test_gateways_know_of_each_other_and_the_first_leads(link):
    (a, leads_a, _), (b, leads_b, _) = one(link(), "a"), one(link(), "b")
    await a.beat("")
    await b.beat("")
    await a.beat("")
    assert a.siblings == ("http://b",)
    assert b.siblings == ("http://a",)
    assert (leads_a.leads, leads_b.leads) == (True, False)
    assert leads_b.leader == "http://a"
    with pytest.raises(ApiError, match="no gateway leads"):
        leads_b.next_epoch()


async def test_a_leader_that_hears_nothing_stops_being_sure_before_another_can_lead(link, monkeypatch):
    assert SURE_S < module.LEASE_S
    monkeypatch.setattr(module, "LEASE_S", 0.2)
    (a, leads_a, clock), (b, leads_b, _) = one(link(), "a"), one(link(), "b")
    await a.beat("")
    first = leads_a.next_epoch()
    clock.now += SURE_S + 0.01
    assert not leads_a.leads
    await asyncio.sleep(0.25)
    await b.beat("")
    assert leads_b.leads
    assert b.siblings == ()
    assert leads_b.next_epoch() > leads_a.next_epoch() > first  # what the old one still says is below
    await a.beat("")
    assert not leads_a.leads


async def test_who_leaves_in_order_is_followed_at_once(link):
    (a, _, _), (b, leads_b, _) = one(link(), "a"), one(link(), "b")
    await a.beat("")
    await b.beat("")
    await a.leave()
    await b.beat("")
    assert leads_b.leads
    assert b.siblings == ()


async def test_epochs_rise_over_a_redis_that_forgot_them(redis, link):
    a, leads_a, _ = one(link(), "a", least=41)
    await a.beat("")
    before = leads_a.next_epoch()
    assert before >> TERM_BITS == 42
    redis.say("FLUSHALL")
    await a.beat("")
    assert leads_a.next_epoch() > before


async def test_the_leaders_threshold_is_told_to_the_others(link):
    (a, _, _), (b, _, _) = one(link(), "a"), one(link(), "b")
    await a.beat("")
    await a.beat("700 found so")
    assert (await b.beat("1000 set")).threshold == "700 found so"


async def test_a_stalled_redis_costs_a_beat_its_deadline_and_nobody_else_anything(redis, link):
    a, _, _ = one(link(), "a")
    await a.beat("")
    redis.stall()
    try:
        longest, last = 0.0, asyncio.get_running_loop().time()
        beat = asyncio.create_task(a.beat(""))
        while not beat.done():
            await asyncio.sleep(0.005)
            now = asyncio.get_running_loop().time()
            longest, last = max(longest, now - last), now
        with pytest.raises(RedisAway):
            beat.result()
        assert longest < 0.2
    finally:
        redis.go_on()
    await a.beat("")


async def test_what_others_keep_under_the_same_name_is_an_error_and_no_crash(redis, link):
    redis.say("HSET", "{prfaas}:replicas", "x", "9999999999999 {}")
    a, _, _ = one(link(), "a")
    with pytest.raises(RedisAway, match="no gateway's"):
        await a.beat("")
