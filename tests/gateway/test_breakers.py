from __future__ import annotations

import asyncio

import pytest

from gateway.failures import AttemptFailed, kind_of
from kvcache.control import GenerateJob, PrefillJob
from kvcache.wire import Role
from scheduler.admission.node_order import LAST
from scheduler.breaker import Breaker, BreakerState, BreakerValues
from scheduler.retrying import Failure
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, Script, answer_well, failing, never, prefill_well

LONG = 60
"""Words of a prompt above the threshold."""


EAST = {"x-prfaas-route-hint": "east"}


def answer_unless_from(silent: str) -> Script:
    async def script(node: FakeNode, job: GenerateJob) -> None:
        prefilled_by = None if job.source is None else job.source.node_id
        await (never if prefilled_by == silent else answer_well)(node, job)

    return script


def state(breaker: Breaker) -> BreakerState:
    return breaker.state(asyncio.get_running_loop().time())


async def open_breaker(one: Stage, failures: int) -> Breaker:
    for _ in range(failures):
        await one.complete(words=LONG)
    breaker = one.gateway.registry.breakers.cluster("east")
    assert state(breaker) is not BreakerState.CLOSED
    return breaker


async def test_a_cluster_that_fails_often_is_no_option_and_the_record_says_so(stage: Open) -> None:
    one = await stage(breaker=BreakerValues(failures=3))
    prefill, _ = await one.pair("east", on_prefill=failing("prefill", "engine_lost"))
    await one.node("p-local", Role.PREFILL)
    await open_breaker(one, 3)
    before = len(prefill.orders)
    answer = await one.complete(words=LONG)
    assert answer.headers["x-prfaas-route"] == "local"
    assert answer.headers["x-prfaas-route-reason"] == "breaker_open"
    assert len(prefill.orders) == before
    record = await one.decision(answer.headers["x-request-id"])
    assert [o["barred"] for o in record["decision"]["options"] if o["cluster"] == "east"] == ["breaker_open"]
    assert not record["fallback"]
    [cluster] = [c for c in (await one.client.get("/v1/clusters")).json()["clusters"] if c["name"] == "east"]
    assert cluster["breaker"] == "open"
    text = (await one.client.get("/metrics")).text
    assert 'prfaas_cb_state{kind="cluster",name="east"} 1.0' in text
    assert 'prfaas_cb_opened_total{kind="node",name="p-east"} 1.0' in text


async def test_a_hint_does_not_go_through_an_open_breaker_and_is_refused_at_once(stage: Open) -> None:
    one = await stage(breaker=BreakerValues(failures=2))
    await one.pair("east", on_prefill=failing("prefill", "engine_lost"))
    await open_breaker(one, 2)
    answer = await one.complete(words=LONG, headers=EAST)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "hinted_cluster_unavailable"


async def test_after_a_while_successes_close_it_again(stage: Open) -> None:
    one = await stage(breaker=BreakerValues(failures=2, successes=2, open_s=0.2))
    prefill, _ = await one.pair("east", on_prefill=failing("prefill", "engine_lost"))
    breaker = await open_breaker(one, 2)
    prefill.on_prefill = prefill_well
    await one.until(lambda: state(breaker) is BreakerState.HALF_OPEN)
    for _ in range(2):
        assert (await one.complete(words=LONG, headers=EAST)).headers["x-prfaas-route"] == "remote:east"
    assert state(breaker) is BreakerState.CLOSED


async def test_half_open_lets_one_request_through_at_a_time(stage: Open) -> None:
    one = await stage(breaker=BreakerValues(failures=2, open_s=0.2))
    prefill, decode = await one.pair("east", on_prefill=failing("prefill", "engine_lost"))
    await one.node("p-local", Role.PREFILL)
    breaker = await open_breaker(one, 2)
    prefill.on_prefill, decode.on_generate = never, answer_unless_from("p-east")
    await one.until(lambda: state(breaker) is BreakerState.HALF_OPEN)
    before = len(prefill.jobs(PrefillJob))
    trial = asyncio.create_task(one.complete(words=LONG, headers=EAST))
    await one.until(lambda: len(prefill.jobs(PrefillJob)) > before)
    assert (await one.complete(words=LONG)).headers["x-prfaas-route-reason"] == "breaker_open"
    trial.cancel()
    await asyncio.wait([trial])
    await one.until(lambda: breaker.admits(asyncio.get_running_loop().time()))
    assert state(breaker) is BreakerState.HALF_OPEN, "a client that left says nothing of the cluster"


async def test_a_prefill_node_with_an_open_breaker_is_passed_over_and_its_neighbour_works(stage: Open) -> None:
    one = await stage(breaker=BreakerValues(failures=1, open_s=30.0))
    bad, _ = await one.pair(on_prefill=failing("prefill", "engine_lost"))
    await one.node("p-zz", Role.PREFILL)
    for _ in range(3):
        assert (await one.complete()).status_code == 200
    assert len(bad.jobs(PrefillJob)) == 1


async def test_the_only_decode_node_is_used_even_where_its_breaker_is_open(stage: Open) -> None:
    one = await stage(breaker=BreakerValues(failures=1))
    _, decode = await one.pair(on_generate=failing("decode", "engine_lost"))
    assert (await one.complete()).status_code == 503
    from tests.gateway.fakes import answer_well

    decode.on_generate = answer_well
    assert (await one.complete()).status_code == 200


async def test_a_restarted_node_begins_with_a_closed_breaker_and_a_reconnected_one_keeps_its_own(stage: Open) -> None:
    one = await stage(breaker=BreakerValues(failures=1))
    bad = await one.node("p-1", Role.PREFILL, on_prefill=failing("prefill", "engine_lost"))
    await one.node("d", Role.DECODE)
    await one.complete()
    breakers, registry = one.gateway.registry.breakers, one.gateway.registry

    def now() -> BreakerState | None:
        session = registry.node("p-1")
        return None if session is None else state(breakers.node(session))

    assert now() is BreakerState.OPEN
    for incarnation, expected in (("one", BreakerState.OPEN), ("two", BreakerState.CLOSED)):
        await bad.stop()
        await one.until(lambda: now() is None)
        bad = await one.node("p-1", Role.PREFILL, incarnation=incarnation)
        assert now() is expected


async def test_a_failed_remote_way_is_tried_again_by_another_one_before_home_is_asked(stage: Open) -> None:
    one = await stage()
    await one.pair("east", on_prefill=failing("prefill", "engine_lost"))
    one.register("west")
    west = await one.node("p-west", Role.PREFILL, cluster="west")
    answer = await one.complete(words=LONG, headers={"x-prfaas-route-hint": "remote"})
    assert answer.headers["x-prfaas-route"] == "remote:west"
    record = await one.decision(answer.headers["x-request-id"])
    assert [attempt["cluster"] for attempt in record["attempts"]] == ["east", "west"]
    assert len(record["retried"]) == 1
    assert not record["fallback"]
    assert len(west.jobs(PrefillJob)) == 1
    assert 'prfaas_retries_total{way="remote"} 1.0' in (await one.client.get("/metrics")).text


async def test_a_fallback_whose_node_is_lost_is_repeated_on_another_one(stage: Open) -> None:
    one = await stage()
    await one.pair("east", on_prefill=failing("prefill", "engine_lost"), on_generate=answer_unless_from("p-1"))
    lost = await one.node("p-1", Role.PREFILL, on_prefill=never)
    await one.node("p-2", Role.PREFILL)
    for name, rate in (("p-1", 9e5), ("p-2", 1e5)):
        session = one.gateway.registry.node(name)
        assert session is not None
        session.speed.claim(rate)
    asked = asyncio.create_task(one.complete(words=LONG))
    await one.until(lambda: lost.jobs(PrefillJob))
    await lost.stop()
    answer = await asked
    assert answer.status_code == 200
    record = await one.decision(answer.headers["x-request-id"])
    assert [attempt["prefill_node"] for attempt in record["attempts"]] == ["p-east", "p-1", "p-2"]
    assert record["fallback"]
    assert len(record["fallback_retried"]) == 1


async def test_what_a_lost_cluster_would_have_taken_comes_after_all_other_work_at_home(stage: Open) -> None:
    one = await stage()
    one.register("east")
    prefill, _ = await one.pair()
    await one.complete(words=LONG)
    await one.complete(words=3)
    long, short = prefill.jobs(PrefillJob)
    assert long.priority >= LAST > short.priority


@pytest.mark.parametrize(
    ("stage_", "cause", "kind"),
    [
        ("queue", "node_lost", Failure.NOT_SENT),
        ("node", "node_lost", Failure.LOST),
        ("queue", "queue_full", Failure.BUSY),
        ("queue", "draining", Failure.BUSY),
        ("wait", "late", Failure.LATE),
        ("queue", "bad_ticket", Failure.BROKEN),
        ("transfer", "digest_mismatch", Failure.BROKEN),
        ("queue", "too_large", Failure.REQUEST),
        ("decode", "slow_client", Failure.REQUEST),
    ],
)
def test_what_a_failure_means_for_another_try(stage_: str, cause: str, kind: Failure) -> None:
    assert kind_of(AttemptFailed(stage_, cause)) is kind
