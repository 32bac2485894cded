from __future__ import annotations

import asyncio
from typing import Any

from kvcache.control import GenerateJob, PrefillJob
from kvcache.wire import Role
from scheduler.breaker import BreakerState, BreakerValues
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, delta, failing, finish, never, receive_kv

NAME = "canary-"


async def two_tokens(node: FakeNode, job: GenerateJob) -> None:
    """As many as a canary asks for."""
    await receive_kv(node, job)
    await node.send(delta(job, 300, "a"))
    await node.send(delta(job, 301, "b"))
    await finish(node, job, "length", 2)


def canaries(node: FakeNode) -> list[GenerateJob]:
    return [job for job in node.jobs(GenerateJob) if job.generation.startswith(NAME)]


def state(one: Stage, node: str) -> BreakerState:
    session = one.gateway.registry.node(node)
    assert session is not None
    return one.gateway.registry.breakers.node(session).state(asyncio.get_running_loop().time())


async def test_a_gateway_is_ready_once_something_was_generated(stage: Open) -> None:
    one = await stage(canary_s=30.0)
    held = asyncio.Event()

    async def when_told(node: FakeNode, job: GenerateJob) -> None:
        await held.wait()
        await two_tokens(node, job)

    decode = await one.node("d", Role.DECODE, on_generate=when_told)
    await one.until(lambda: canaries(decode))
    answer = await one.client.get("/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no decode node has generated anything yet")
    held.set()
    await one.until(lambda: one.gateway.not_ready() is None)
    assert (await one.client.get("/ready")).status_code == 200
    assert 'prfaas_canary_total{outcome="ok"} 1.0' in (await one.client.get("/metrics")).text


async def test_every_node_is_tried_once_and_then_left_alone_while_it_proves_itself(stage: Open) -> None:
    one = await stage(canary_s=30.0)
    prefill, decode = await one.pair("east", on_generate=two_tokens)
    await one.until(lambda: len(canaries(decode)) == 2)  # in place, and for the remote prefill node
    await asyncio.sleep(1.2)  # two more looks
    assert len(canaries(decode)) == 2
    assert len(prefill.jobs(PrefillJob)) == 1
    assert (await one.decision("canary")).get("error"), "it leaves no decision record"


async def test_users_requests_are_proof_enough(stage: Open) -> None:
    one = await stage(canary_s=1.0)
    decode = await one.node("d", Role.DECODE, on_generate=two_tokens)
    await one.until(lambda: canaries(decode))
    before = len(canaries(decode))
    for _ in range(15):
        await one.complete()
        await asyncio.sleep(0.1)
    assert len(canaries(decode)) == before


async def test_a_node_that_is_busy_gets_none(stage: Open) -> None:
    one = await stage(canary_s=0.5)
    decode = await one.node("d", Role.DECODE, on_generate=two_tokens)
    await one.until(lambda: canaries(decode))
    decode.on_generate = never
    asked = asyncio.create_task(one.complete())
    await one.until(lambda: len(decode.jobs(GenerateJob)) > len(canaries(decode)))
    before = len(canaries(decode))
    await asyncio.sleep(1.2)
    assert len(canaries(decode)) == before
    asked.cancel()
    await asyncio.wait([asked])


async def test_canaries_open_a_breaker_before_a_user_meets_the_fault_and_close_it_again(stage: Open) -> None:
    one = await stage(canary_s=0.1, breaker=BreakerValues(failures=2, successes=2, open_s=0.2))
    well = asyncio.Event()

    async def once_well(node: FakeNode, job: GenerateJob) -> None:
        broken = job.source is not None and not well.is_set()
        await (failing("transfer", "peer_lost") if broken else two_tokens)(node, job)

    await one.pair("east", on_generate=once_well)
    await one.until(lambda: state(one, "p-east") is not BreakerState.CLOSED)
    well.set()
    await one.until(lambda: state(one, "p-east") is BreakerState.CLOSED)


async def test_health_generate_generates_once_for_all_that_ask_and_says_why_it_cannot(stage: Open) -> None:
    one = await stage()

    async def slowly(node: FakeNode, job: Any) -> None:
        await asyncio.sleep(0.1)
        await two_tokens(node, job)

    assert (await one.client.get("/health_generate")).json()["reason"] == "no decode node accepts work"
    decode = await one.node("d", Role.DECODE, on_generate=slowly)
    answers = await asyncio.gather(*(one.client.get("/health_generate") for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len(canaries(decode)) == 1
    await asyncio.sleep(1.1)
    decode.on_generate = failing("decode", "engine_lost")
    broken = await one.client.get("/health_generate")
    assert (broken.status_code, broken.json()["reason"]) == (503, "a generation on d failed: decode: engine_lost")
