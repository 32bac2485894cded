"""A node changes its role while requests run: drained, flipped, proved by real work, and put back where that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.conversions import ConversionLimits
from gateway.executors import ConversionFailed, Order
from gateway.history import ConversionRecord, History, Phase
from gateway.leadership import SoleGateway
from gateway.state import State
from kvcache.control import ChangeRole, Finished, GenerateJob, PrefillJob
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, delta, failing, never, prefill_well, receive_kv


async def two_tokens(node: FakeNode, job: GenerateJob) -> None:
    """As many as a verification asks for."""
    await receive_kv(node, job)
    for token in (300, 301):
        await node.send(delta(job, token, "t "))
    await node.send(Finished(job.generation, "length", len(job.token_ids), 2, 0))


async def three(stage: Stage) -> tuple[FakeNode, FakeNode, FakeNode]:
    """A prefill node and two decode nodes, all at home, all accepting connections."""
    nodes = [
        await stage.node(name, role, on_generate=two_tokens)
        for name, role in (("p", Role.PREFILL), ("d1", Role.DECODE), ("d2", Role.DECODE))
    ]
    return nodes[0], nodes[1], nodes[2]


async def convert(stage: Stage, node: str, role: str) -> dict[str, Any]:
    answer = await stage.client.post(f"/v1/nodes/{node}/role", json={"role": role})
    assert answer.status_code == 202, answer.text
    record: dict[str, Any] = answer.json()
    return record


async def ended(stage: Stage, number: int) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            record: dict[str, Any] = (await stage.client.get(f"/v1/conversions/{number}")).json()
            if record["ended"] is not None:
                return record
            await asyncio.sleep(0.01)


def role(stage: Stage, node: str) -> Role:
    session = stage.gateway.registry.node(node)
    assert session is not None
    assert session.becoming is None
    return session.join.role


async def test_a_decode_node_prefills_after_it_was_proved_by_a_real_prefill(stage: Open) -> None:
    one = await stage()
    _, _, d2 = await three(one)
    record = await ended(one, (await convert(one, "d2", "prefill"))["id"])
    assert [phase for _, phase in record["steps"]] == ["draining", "flipping", "verifying", "done"]
    assert (record["role_from"], record["role_to"], record["by"]) == ("decode", "prefill", "loopback")
    assert role(one, "d2") is Role.PREFILL
    assert [type(order).__name__ for order in d2.orders] == ["ChangeRole", "PrefillJob"]
    assert len(d2.jobs(PrefillJob)[0].token_ids) == 130
    assert b'prfaas_conversions_total{outcome="done"} 1.0' in (await one.client.get("/metrics")).content
    back = await ended(one, (await convert(one, "d2", "decode"))["id"])
    assert back["phase"] == "done"
    assert back["epoch"] > record["epoch"]


async def test_what_runs_there_is_finished_first_and_nothing_new_goes_there(stage: Open) -> None:
    one = await stage()
    p, d1, d2 = await three(one)
    gate = asyncio.Event()

    async def slow(node: FakeNode, job: GenerateJob) -> None:
        await receive_kv(node, job)
        await node.send(delta(job, 300, "t "))
        await gate.wait()
        await node.send(Finished(job.generation, "stop", len(job.token_ids), 1, 0))

    d1.on_generate = d2.on_generate = slow
    first = [asyncio.create_task(one.complete()) for _ in range(2)]
    await one.until(lambda: d1.jobs(GenerateJob) and d2.jobs(GenerateJob))
    number = (await convert(one, "d2", "prefill"))["id"]
    d1.on_generate = two_tokens
    later = [await one.complete() for _ in range(3)]
    assert [answer.status_code for answer in later] == [200] * 3
    assert len(d2.jobs(GenerateJob)) == 1
    assert not d2.jobs(ChangeRole)
    assert (await one.client.get(f"/v1/conversions/{number}")).json()["phase"] == "draining"
    gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*first)] == [200, 200]
    assert (await ended(one, number))["phase"] == "done"
    assert p.violations == []


async def test_a_node_that_fails_its_proof_is_put_back_and_serves_as_before(stage: Open) -> None:
    one = await stage()
    _, _, d2 = await three(one)
    d2.on_prefill = failing("prefill", "engine_lost")
    record = await ended(one, (await convert(one, "d2", "prefill"))["id"])
    assert (record["phase"], role(one, "d2")) == ("rolled_back", Role.DECODE)
    assert "engine_lost" in record["detail"]
    orders = d2.jobs(ChangeRole)
    assert [order.role for order in orders] == [Role.PREFILL, Role.DECODE]
    assert orders[1].epoch > orders[0].epoch
    assert one.gateway.rebalancing.conversions.take_failed() == ("d2",)
    d2.on_prefill = prefill_well
    assert (await ended(one, (await convert(one, "d2", "prefill"))["id"]))["phase"] == "done"


async def test_a_node_that_will_not_change_and_not_change_back_gets_no_work_until_it_joins_anew(stage: Open) -> None:
    one = await stage()
    _, d1, d2 = await three(one)
    d2.obeys = False
    record = await ended(one, (await convert(one, "d2", "prefill"))["id"])
    assert record["phase"] == "stuck"
    session = one.gateway.registry.node("d2")
    assert session is not None
    assert not session.accepting
    assert (await one.complete()).status_code == 200
    assert d1.jobs(GenerateJob)
    assert not d2.jobs(GenerateJob)


async def test_a_node_that_leaves_in_the_middle_is_lost_and_plays_what_it_says_when_it_is_back(stage: Open) -> None:
    one = await stage()
    _, d1, d2 = await three(one)
    d1.on_generate = never

    async def die(node: FakeNode, job: PrefillJob) -> None:
        node.abort()

    d2.on_prefill = die
    number = (await convert(one, "d2", "prefill"))["id"]
    assert (await ended(one, number))["phase"] == "lost"
    assert one.gateway.registry.node("d2") is None
    again = await one.node("d2", Role.DECODE, incarnation="two")
    assert role(one, "d2") is Role.DECODE
    assert again.violations == []


async def test_phases_that_take_too_long_put_the_node_back(stage: Open) -> None:
    one = await stage()
    _, d1, d2 = await three(one)
    conversions = one.gateway.rebalancing.conversions
    conversions._limits = ConversionLimits(drain_s=0.05, flip_s=5.0, verify_s=0.05)
    d1.on_generate = never
    record = await ended(one, (await convert(one, "d2", "prefill"))["id"])
    assert (record["phase"], role(one, "d2")) == ("rolled_back", Role.DECODE)
    assert "verify took longer" in record["detail"]
    d2.on_generate = never
    waiting = asyncio.create_task(one.complete())
    busy = asyncio.create_task(one.complete())
    await one.until(lambda: d2.jobs(GenerateJob))
    record = await ended(one, (await convert(one, "d2", "prefill"))["id"])
    assert "drain took longer" in record["detail"]
    assert [order.role for order in d2.jobs(ChangeRole)] == [Role.PREFILL, Role.DECODE]
    for task in (waiting, busy):
        task.cancel()
    await asyncio.gather(waiting, busy, return_exceptions=True)


async def test_another_executor_that_fails_undoes_what_the_node_did(stage: Open) -> None:
    one = await stage()
    _, _, d2 = await three(one)
    asked: list[Role] = []

    class Label:
        async def change(self, order: Order) -> None:
            asked.append(order.role)
            if order.role is Role.PREFILL:
                raise ConversionFailed("kubernetes", "forbidden")

    one.gateway.rebalancing.conversions._executors._others["d2"] = (Label(),)
    record = await ended(one, (await convert(one, "d2", "prefill"))["id"])
    assert (record["phase"], role(one, "d2")) == ("rolled_back", Role.DECODE)
    assert asked == [Role.PREFILL, Role.DECODE]
    assert len(d2.jobs(ChangeRole)) == 2


@pytest.mark.parametrize(
    ("node", "to", "code"),
    [
        ("nobody", "prefill", "node_not_found"),
        ("d", "decode", "role_unchanged"),
        ("d", "prefill", "last_decode_node"),
        ("old", "decode", "role_impossible"),
        ("far", "decode", "role_impossible"),
        ("dialer", "decode", "role_impossible"),
        ("d", "both", None),
    ],
)
async def test_a_conversion_that_could_not_work_is_refused_naming_why(
    stage: Open, node: str, to: str, code: str | None
) -> None:
    one = await stage()
    one.register("east")
    await one.node("d", Role.DECODE)
    await one.node("old", Role.PREFILL, converts=False)
    await one.node("far", Role.PREFILL, cluster="east")
    await one.node("dialer", Role.PREFILL, kv=False)
    await one.node("dialer-2", Role.PREFILL, kv=False)
    answer = await one.client.post(f"/v1/nodes/{node}/role", json={"role": to})
    assert answer.status_code == {"node_not_found": 404, None: 400}.get(code, 409), answer.text
    assert answer.json()["error"]["code"] == code


async def test_one_node_is_converted_once_at_a_time(stage: Open) -> None:
    one = await stage()
    _, d1, _ = await three(one)
    gate = asyncio.Event()

    async def held(node: FakeNode, job: GenerateJob) -> None:
        await gate.wait()
        await two_tokens(node, job)

    d1.on_generate = held  # whoever speaks decides when the verification is over
    number = (await convert(one, "d2", "prefill"))["id"]
    again = await one.client.post("/v1/nodes/d2/role", json={"role": "prefill"})
    assert again.json()["error"]["code"] == "conversion_running"
    gate.set()
    await ended(one, number)


async def test_a_conversion_that_a_gateway_left_unfinished_ends_as_interrupted_and_epochs_go_on(
    tmp_path: Path, stage: Open, config: GatewayConfig
) -> None:
    file = tmp_path / "state.db"
    before = State(file)
    history, leader = History(before), SoleGateway(before)
    assert [leader.next_epoch(), leader.next_epoch()] == [1, 2]
    started = history.begin(ConversionRecord(0, "d2", "decode", "prefill", 2, 1.0, Phase.FLIPPING, "why", "me"))
    before.close()
    one = await stage(state_file=file)
    record = (await one.client.get(f"/v1/conversions/{started.id}")).json()
    assert (record["phase"], record["epoch"]) == ("interrupted", 2)
    await three(one)
    assert (await convert(one, "d2", "prefill"))["epoch"] == 3
    assert (await ended(one, started.id + 1))["phase"] == "done"
    listed = (await one.client.get("/v1/conversions")).json()["conversions"]
    assert [each["phase"] for each in listed] == ["done", "interrupted"]


async def test_a_number_that_no_conversion_can_have_is_an_answer_and_no_failure(stage: Open) -> None:
    one = await stage()
    statuses = [(await one.client.get(f"/v1/conversions/{number}")).status_code for number in (-1, 2**63 - 1, 10**20)]
    assert statuses == [400, 404, 400]
