"""Audits of remote KV, as a gateway asks for them and judges them."""

from __future__ import annotations

from typing import Any

from gateway.keys import Role as KeyRole
from kvcache.control import FromNode
from kvcache.control.audits import AuditKv, KvAudited
from kvcache.wire import Role
from scheduler.auditing import AuditValues
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode

ALWAYS = AuditValues(share=1.0, strikes=2)


async def audited(stage: Open, **changes: Any) -> tuple[Stage, FakeNode]:
    one = await stage(**({"audit": ALWAYS} | changes))
    one.register("east")
    await one.node("p-east", Role.PREFILL, cluster="east")
    return one, await one.node("d", Role.DECODE, audits=True)


async def asked(one: Stage, decode: FakeNode, count: int, **body: Any) -> AuditKv:
    answer = await one.complete(words=60, headers={"x-prfaas-route-hint": "east"}, **body)
    assert answer.headers["x-prfaas-route"] == "remote:east", answer.text
    await one.until(lambda: len(decode.jobs(AuditKv)) == count)
    found: AuditKv = decode.jobs(AuditKv)[-1]
    return found


async def told(one: Stage, decode: FakeNode, message: FromNode, failed: int) -> None:
    await decode.send(message)
    await one.until(lambda: (await_audits(one).passed, await_audits(one).failed)[1] >= failed)


def await_audits(one: Stage) -> Any:
    return one.gateway.generation._s.audits.of("east")


async def test_a_cluster_whose_kv_is_wrong_again_and_again_is_drained_and_can_be_resumed(stage: Open) -> None:
    one, decode = await audited(stage)
    for number in (1, 2):
        order = await asked(one, decode, number, prompt=f"{number} " * 60)
        assert order.origin == "p-east"
        await told(one, decode, KvAudited(order.audit, 64, 1.3), number)
    await one.until(lambda: one.gateway.registry.cluster("east").security.flagged)
    cluster = (await one.client.get("/v1/clusters/east")).json()
    assert (cluster["state"], cluster["audits"]["flagged"], cluster["audits"]["failed"]) == ("draining", True, 2)
    entry = (await one.client.get("/v1/audit")).json()["entries"][0]
    assert (entry["actor"], entry["outcome"], entry["cluster"]) == ("kv audit", "flagged", "east")
    text = (await one.client.get("/metrics")).text
    assert 'prfaas_kv_audits_total{cluster="east",outcome="failed"} 2.0' in text
    assert 'prfaas_kv_audit_flagged{cluster="east"} 1.0' in text
    one.gateway.keys.create("root", KeyRole.ADMIN)
    _, secret = one.gateway.keys.create("of east", KeyRole.OPERATOR, False, frozenset({"east"}))
    _, other = one.gateway.keys.create("of all", KeyRole.OPERATOR)
    its_own = await one.client.post("/v1/clusters/east/resume", headers={"Authorization": f"Bearer {secret}"})
    assert (its_own.status_code, its_own.json()["error"]["code"]) == (403, "cluster_scope")
    headers = {"Authorization": f"Bearer {other}"}
    await one.client.post("/v1/clusters/east/rotate", json={"revoke": True}, headers=headers)
    assert one.gateway.registry.cluster("east").security.flagged
    resumed = (await one.client.post("/v1/clusters/east/resume", headers=headers)).json()
    assert (resumed["state"], resumed["audits"]["flagged"]) == ("active", False)


async def test_kv_that_is_right_leaves_a_cluster_as_it_is(stage: Open) -> None:
    one, decode = await audited(stage)
    order = await asked(one, decode, 1)
    await decode.send(KvAudited(order.audit, 64, 0.001))
    await one.until(lambda: await_audits(one).passed == 1)
    assert (await one.client.get("/v1/clusters/east")).json()["state"] == "active"


async def test_what_could_not_be_compared_says_nothing_and_an_answer_counts_once(stage: Open) -> None:
    one, decode = await audited(stage)
    order = await asked(one, decode, 1)
    await decode.send(KvAudited(order.audit, cause="no_room"))
    for _ in range(3):
        await decode.send(KvAudited(order.audit, 64, 2.0))
    await decode.heartbeat()
    await asked(one, decode, 2, prompt="x " * 60)
    assert (await_audits(one).passed, await_audits(one).failed) == (0, 0)


async def test_another_node_cannot_answer_for_the_one_that_was_asked(stage: Open) -> None:
    one, decode = await audited(stage)
    liar = await one.node("liar", Role.PREFILL, cluster="east", audits=True)
    order = await asked(one, decode, 1)
    await liar.send(KvAudited(order.audit, 64, 0.0))
    await told(one, decode, KvAudited(order.audit, 64, 1.0), 1)
    assert await_audits(one).passed == 0


async def test_nothing_is_asked_where_the_share_is_none_or_the_node_knows_no_audits(stage: Open) -> None:
    one, decode = await audited(stage, audit=AuditValues(share=0.0))
    for _ in range(3):
        await one.complete(words=60, headers={"x-prfaas-route-hint": "east"})
    assert decode.jobs(AuditKv) == []
