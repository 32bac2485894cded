"""Long prompts that a slow remote cluster keeps at home: last there, held back, and in the end sent away after all."""

from __future__ import annotations

import asyncio
from typing import Any

from kvcache.control import GenerateJob, PrefillJob
from kvcache.wire import Role
from scheduler.admission.node_order import LAST
from scheduler.breaker import BreakerValues
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, answer_well, never

LONG = 60
"""Words of a prompt above the threshold: 120 tokens, 30 KB of KV."""
HOME = {"x-prfaas-route-hint": "local"}


async def slow_cluster(stage: Open, bytes_per_s: float, **changes: Any) -> tuple[Stage, FakeNode, FakeNode]:
    """A home and a cluster of one prefill node each, over a second for a long prompt, and a slow way between them."""

    async def unless_held(node: FakeNode, job: GenerateJob) -> None:
        await (never if len(job.token_ids) < 2 * LONG else answer_well)(node, job)

    one = await stage(**changes)
    one.register("east")
    home = await one.node("p-home", Role.PREFILL, speed=100.0)
    east = await one.node("p-east", Role.PREFILL, cluster="east", speed=100.0)
    await one.node("d", Role.DECODE, on_generate=unless_held)
    now = asyncio.get_running_loop().time()
    one.gateway.registry.link("local").observe(10**9, 1.0, 1.0, now)
    one.gateway.registry.link("east").observe(int(bytes_per_s), 1.0, 1.0, now)
    return one, home, east


async def held(one: Stage, home: FakeNode) -> asyncio.Task[object]:
    """Home is busy: a prompt that may be nowhere else, and is never done."""
    home.on_prefill = never
    task = asyncio.create_task(one.complete(words=LONG - 1, headers=HOME))
    await one.until(lambda: home.jobs(PrefillJob))
    return task


async def test_it_comes_last_on_its_node(stage: Open) -> None:
    one, home, _ = await slow_cluster(stage, 1e3)
    answer = await one.complete(words=LONG)
    assert answer.headers["x-prfaas-route-reason"] == "remote_slower"
    await one.complete(words=LONG, headers=HOME)
    long, hinted = home.jobs(PrefillJob)
    assert long.priority >= LAST > hinted.priority


async def test_it_is_kept_out_of_a_busy_home_and_goes_the_slower_way_once_that_is_quicker_after_all(
    stage: Open,
) -> None:
    one, home, east = await slow_cluster(stage, 8e3)
    busy = await held(one, home)
    came = [asyncio.create_task(one.complete(words=LONG))]
    await one.until(lambda: one.gateway.waiting.view()["waiting"] == 1)
    assert not east.jobs(PrefillJob)
    came.append(asyncio.create_task(one.complete(words=LONG + 1)))
    answers = await asyncio.gather(*came)
    assert [answer.headers["x-prfaas-route"] for answer in answers] == ["remote:east", "remote:east"]
    lengths = [len(job.token_ids) for job in east.jobs(PrefillJob)]
    assert lengths == sorted(lengths), "nor does one that came later pass it"
    record = await one.decision(answers[0].headers["x-request-id"])
    assert record["decision"]["facts"]["request"]["waited_s"] > 0.05
    assert len(home.jobs(PrefillJob)) == 1
    busy.cancel()
    await asyncio.wait([busy])


async def test_what_would_come_too_late_in_any_case_is_refused_and_not_computed_in_vain(stage: Open) -> None:
    one, home, _ = await slow_cluster(stage, 1e3, request_timeout_s=1.0)
    answer = await one.complete(words=LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert answer.headers["retry-after"]
    assert not home.jobs(PrefillJob)
    assert (await one.complete(words=LONG, headers=HOME)).status_code == 200, "predictions of other work may be wrong"


async def test_how_late_what_came_last_was_before_counts(stage: Open) -> None:
    one, home, _ = await slow_cluster(stage, 1e3, request_timeout_s=2.5)
    for _ in range(40):
        one.gateway.registry.last_accuracy.observe(1.0, 3.0, asyncio.get_running_loop().time())
    assert (await one.complete(words=LONG)).json()["error"]["code"] == "overloaded"
    assert not home.jobs(PrefillJob)


async def test_a_home_that_does_other_things_first_is_not_blamed(stage: Open) -> None:
    one, home, _ = await slow_cluster(stage, 1e3, request_timeout_s=1.5, breaker=BreakerValues(failures=1))
    home.on_prefill = never
    (decode,) = (node for node in one.nodes if node.name == "d")
    decode.on_generate = never
    assert (await one.complete(words=LONG)).json()["error"]["code"] == "request_timeout"
    session = one.gateway.registry.node("p-home")
    assert session is not None
    assert one.gateway.registry.breakers.node(session).admits(asyncio.get_running_loop().time())
