"""Requests that find all nodes full: they wait, in a fair order, for a bounded time, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.keys import Role as KeyRole
from gateway.terms import KeyLimits
from kvcache.control import GenerateJob, PrefillJob
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, answer_well, failing, never, prefill_well, receive_kv


class Turnstile:
    """A script for decode nodes: each job is answered when the test lets it, and they say who came in which order."""

    def __init__(self) -> None:
        self.came: list[GenerateJob] = []
        self._passes = asyncio.Semaphore(0)

    async def __call__(self, node: FakeNode, job: GenerateJob) -> None:
        self.came.append(job)
        await self._passes.acquire()
        await answer_well(node, job)

    def let(self, count: int) -> None:
        for _ in range(count):
            self._passes.release()

    @property
    def lengths(self) -> list[int]:
        return [len(job.token_ids) for job in self.came]


async def narrow(one: Stage, slots: int = 1) -> Turnstile:
    """One decode node with that many slots, which prefills in place."""
    turnstile = Turnstile()
    await one.node("d", Role.DECODE, max_queue=slots, on_generate=turnstile)
    return turnstile


def waiting(one: Stage) -> int:
    found = one.gateway.waiting.view()["waiting"]
    assert isinstance(found, int)
    return found


async def ask(one: Stage, count: int, **how: Any) -> list[asyncio.Task[httpx.Response]]:
    """So many requests in this order, all at the gateway when it returns."""
    tasks = []
    for _ in range(count):
        before = waiting(one) + len(one.gateway.registry.nodes()[0].jobs)
        tasks.append(asyncio.create_task(one.complete(**how)))
        await one.until(lambda: waiting(one) + len(one.gateway.registry.nodes()[0].jobs) > before)  # noqa: B023
    return tasks


@pytest.fixture
async def crowd(stage: Open) -> AsyncIterator[tuple[Stage, Turnstile]]:
    """A stage whose only slot is taken."""
    one = await stage()
    turnstile = await narrow(one)
    held = await ask(one, 1)
    await one.until(lambda: turnstile.came)
    yield one, turnstile
    turnstile.let(1000)
    await asyncio.gather(*held)
    await one.until(lambda: not waiting(one))


async def test_two_hundred_at_once_are_all_answered_by_nodes_with_eight_slots(stage: Open) -> None:
    one = await stage()
    await one.pair()
    async with httpx.AsyncClient(base_url=one.url, timeout=30, limits=httpx.Limits(max_connections=200)) as client:
        body = {"model": "tiny", "prompt": "ab ab ab", "max_tokens": 8}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(200)))
    assert {answer.status_code for answer in answers} == {200}
    figures = (await one.client.get("/metrics")).text
    assert "prfaas_num_requests_waiting 0.0" in figures
    queued = float(figures.split('prfaas_admitted_total{how="queued"} ')[1].split("\n")[0])
    assert queued > 100
    assert f"prfaas_request_queue_time_seconds_count {queued}" in figures


async def test_waiting_counts_in_the_time_to_first_token(crowd: tuple[Stage, Turnstile]) -> None:
    one, turnstile = crowd
    (task,) = await ask(one, 1)
    await asyncio.sleep(0.3)
    turnstile.let(2)
    record = await one.decision((await task).headers["x-request-id"])
    assert record["queue_s"] > 0.3
    assert record["ttft_s"] >= record["queue_s"]


async def test_of_two_tenants_one_that_floods_delays_the_other_by_one_request(stage: Open) -> None:
    one = await stage()
    turnstile = await narrow(one)
    _, root = one.gateway.keys.create("root", KeyRole.ADMIN)
    keys = [one.gateway.keys.create(t, KeyRole.CLIENT, limits=KeyLimits(tenant=t))[1] for t in ("flood", "calm")]
    flood, calm = ({"authorization": f"Bearer {key}"} for key in keys)
    one.client.headers["authorization"] = f"Bearer {root}"
    floods = await ask(one, 40, words=3, headers=flood)
    turnstile.let(5)
    await one.until(lambda: len(turnstile.came) == 6)
    (calm_one,) = await ask(one, 1, words=5, headers=calm)
    turnstile.let(2)
    assert (await calm_one).status_code == 200
    assert waiting(one) >= 32
    turnstile.let(1000)
    assert {answer.status_code for answer in await asyncio.gather(*floods)} == {200}


async def test_a_tenant_of_twice_the_weight_gets_twice_the_turns(stage: Open) -> None:
    one = await stage()
    turnstile = await narrow(one)
    _, root = one.gateway.keys.create("root", KeyRole.ADMIN)
    one.client.headers["authorization"] = f"Bearer {root}"
    done = await one.client.put("/v1/tenants/gold", json={"weight": 2.0})
    assert (done.status_code, done.json()["weight"]) == (200, 2.0)
    tasks = []
    for words, tenant in ((3, "plain"), (4, "gold")):
        _, key = one.gateway.keys.create(tenant, KeyRole.CLIENT, limits=KeyLimits(tenant=tenant))
        tasks += await ask(one, 30, words=words, headers={"authorization": f"Bearer {key}"}, max_tokens=100)
    turnstile.let(30)
    await one.until(lambda: len(turnstile.came) == 31)
    gold = sum(length == max(turnstile.lengths) for length in turnstile.lengths[1:])
    assert 18 <= gold <= 22
    turnstile.let(1000)
    await asyncio.gather(*tasks)


async def test_short_prompts_pass_long_ones_and_urgent_ones_pass_both(crowd: tuple[Stage, Turnstile]) -> None:
    one, turnstile = crowd
    tasks = await ask(one, 2, words=200)
    tasks += await ask(one, 2, words=4)
    tasks += await ask(one, 1, words=6, priority=-1)
    turnstile.let(100)
    await asyncio.gather(*tasks)
    urgent, *others = turnstile.lengths[1:]
    assert others == sorted(others)
    assert others[1] < urgent < others[2]


async def test_a_client_that_leaves_the_queue_is_forgotten_at_once(crowd: tuple[Stage, Turnstile]) -> None:
    one, turnstile = crowd
    leaving = await ask(one, 20)
    (staying,) = await ask(one, 1, words=7)
    for task in leaving:
        task.cancel()
    await one.until(lambda: waiting(one) == 1, 2.0)
    turnstile.let(2)
    assert (await staying).status_code == 200
    assert len(turnstile.came) == 2
    assert not one.gateway.waiting._places


async def test_clients_that_leave_in_the_moment_of_their_turn_leak_no_slot(stage: Open) -> None:
    one = await stage()
    await one.pair()
    for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
        tasks = [asyncio.create_task(one.complete()) for _ in range(60)]
        await asyncio.sleep(delay)
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks[1::2])
        assert {answer.status_code for answer in answers} == {200}
    await one.until(lambda: not any(node.jobs or node.awaited for node in one.gateway.registry.nodes()))
    assert waiting(one) == 0
    assert not one.gateway.waiting._places


async def test_who_waits_too_long_is_told_what_was_full(stage: Open) -> None:
    one = await stage(queue_timeout_s=0.2)
    turnstile = await narrow(one)
    held = await ask(one, 1)
    answer = await one.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
    assert "--queue-timeout" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert (await one.decision(answer.headers["x-request-id"]))["decision"]["reason"] == "overloaded"
    turnstile.let(1)
    await asyncio.gather(*held)


async def test_a_full_queue_refuses_and_who_fills_it_makes_room_for_others(stage: Open) -> None:
    one = await stage(queue=4)
    turnstile = await narrow(one)
    _, root = one.gateway.keys.create("root", KeyRole.ADMIN)
    one.client.headers["authorization"] = f"Bearer {root}"
    _, key = one.gateway.keys.create("calm", KeyRole.CLIENT)
    held = await ask(one, 5)
    over = await one.complete()
    assert (over.status_code, over.json()["error"]["code"]) == (503, "queue_full")
    assert "--queue 4" in over.json()["error"]["message"]
    calm = asyncio.create_task(one.complete(headers={"authorization": f"Bearer {key}"}))
    done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    pushed = done.pop().result()
    assert (pushed.status_code, pushed.json()["error"]["code"]) == (429, "queue_full")
    turnstile.let(100)
    assert (await calm).status_code == 200
    assert sorted(answer.status_code for answer in await asyncio.gather(*held)) == [200] * 4 + [429]


async def test_what_cannot_be_in_time_is_refused_at_once(stage: Open) -> None:
    one = await stage()
    await one.pair(speed=1000.0)
    assert (await one.complete(words=30)).status_code == 200
    late = await one.complete(words=300, headers={"x-prfaas-route-hint": "local", "x-prfaas-ttft-slo": "0.01"})
    assert (late.status_code, late.json()["error"]["code"]) == (503, "slo_unattainable")
    assert (await one.complete(words=30, headers={"x-prfaas-ttft-slo": "20"})).status_code == 200
    wrong = await one.complete(headers={"x-prfaas-ttft-slo": "soon"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-prfaas-ttft-slo")


async def test_who_waits_longer_than_its_slo_is_refused_then(crowd: tuple[Stage, Turnstile]) -> None:
    one, _ = crowd
    answer = await one.complete(headers={"x-prfaas-ttft-slo": "0.2"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "slo_unattainable")
    assert waiting(one) == 0


async def test_requests_for_a_full_cluster_wait_and_hold_up_nobody_else(stage: Open) -> None:
    async def nothing_from_east(node: FakeNode, job: GenerateJob) -> None:
        assert job.source is not None
        await (never if job.source.node_id == "p-east" else answer_well)(node, job)

    one = await stage()
    one.register("east")
    await one.node("p-east", Role.PREFILL, cluster="east", max_queue=1, on_prefill=never)
    await one.node("p", Role.PREFILL)
    await one.node("d", Role.DECODE, on_generate=nothing_from_east)
    east = {"x-prfaas-route-hint": "east"}
    tasks = [asyncio.create_task(one.complete(headers=east)) for _ in range(3)]
    await one.until(lambda: waiting(one) == 2)
    assert (await one.complete()).status_code == 200
    assert waiting(one) == 2
    for task in tasks:
        task.cancel()
    await one.until(lambda: waiting(one) == 0)


async def test_a_fallback_waits_behind_all_others(stage: Open) -> None:
    async def nothing_at_first(node: FakeNode, job: GenerateJob) -> None:
        first = len(node.jobs(GenerateJob)) == 1 or job.source is None or job.source.node_id == "p-east"
        await (never if first else answer_well)(node, job)

    one = await stage()
    one.register("east")
    await one.node("p-east", Role.PREFILL, cluster="east", on_prefill=failing("prefill", "engine_lost"))
    prefill = await one.node("p", Role.PREFILL, max_queue=1, on_prefill=never)
    await one.node("d", Role.DECODE, max_queue=64, on_generate=nothing_at_first)
    held = asyncio.create_task(one.complete(words=3))
    await one.until(lambda: prefill.jobs(PrefillJob))
    fallback = asyncio.create_task(one.complete(words=60))
    await one.until(lambda: waiting(one) == 1)
    others = [asyncio.create_task(one.complete(words=4)) for _ in range(3)]
    await one.until(lambda: waiting(one) == 4)
    prefill.on_prefill = prefill_well
    held.cancel()
    assert (await fallback).status_code == 200
    await asyncio.gather(*others)
    lengths = [len(job.token_ids) for job in prefill.jobs(PrefillJob)]
    assert lengths[-1] == max(lengths)
    ranks = [job.priority for job in prefill.jobs(PrefillJob)]
    assert ranks[-1] == max(ranks)


async def test_a_prefill_node_has_its_slot_again_once_its_kv_has_come(stage: Open) -> None:
    one = await stage()
    turnstile = Turnstile()

    async def transferred(node: FakeNode, job: GenerateJob) -> None:
        await receive_kv(node, job)
        await turnstile(node, GenerateJob(job.generation, job.token_ids, job.sampling, None, job.deadline))

    await one.node("p", Role.PREFILL, max_queue=1)
    await one.node("d", Role.DECODE, max_queue=64, on_generate=transferred)
    tasks = [asyncio.create_task(one.complete()) for _ in range(4)]
    await one.until(lambda: len(turnstile.came) == 4)
    turnstile.let(4)
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}


async def test_a_newcomer_that_finds_room_does_not_pass_who_waits_for_it(stage: Open) -> None:
    one = await stage()
    turnstile = await narrow(one)
    (decode,) = one.nodes
    decode.beating = False
    await decode.heartbeat(queued_jobs=1)
    session = one.gateway.registry.nodes()[0]
    await one.until(lambda: not session.free_slots)
    first = asyncio.create_task(one.complete(words=20))
    await one.until(lambda: waiting(one) == 1)
    await decode.heartbeat()
    second = asyncio.create_task(one.complete(words=21))
    await one.until(lambda: turnstile.came)
    turnstile.let(2)
    await asyncio.gather(first, second)
    assert turnstile.lengths == sorted(turnstile.lengths)
