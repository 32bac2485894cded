"""Two whole gateways on one real Redis: what is said to one holds on the other, and without Redis both go on."""

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest
import websockets

from gateway.clusters import ClusterState
from gateway.history import ConversionRecord, Phase
from gateway.keys import Role as KeyRole
from gateway.kv_audits import Served
from gateway.shared import roster, together
from gateway.shared.redis_url import parse_redis
from gateway.terms import KeyLimits
from kvcache import control
from kvcache.control import ChangeRole
from kvcache.control.audits import KvAudited
from kvcache.control.replicas import Already, Siblings
from kvcache.wire import Role
from tests.gateway.fakes import FakeNode, never


@pytest.fixture
async def both(stage, redis, monkeypatch):
    """Two gateways that have heard of each other; the first leads."""
    monkeypatch.setattr(together, "BEAT_S", 0.05)
    found = []
    for name in ("a", "b"):
        found.append(await stage(redis=parse_redis(redis.url), advertise=f"http://127.0.0.1:1/{name}"))
        await found[-1].until(lambda: len(found[-1].gateway.shared._roster.replicas) == len(found))
    first, second = found
    await first.until(lambda: first.gateway.shared.gateways == 2)
    _, root = first.gateway.keys.create("root", KeyRole.ADMIN)
    for one in found:
        one.client.headers["Authorization"] = f"Bearer {root}"
    first.gateway.shared._rows._era = None  # as one that brings a key along in its file
    await second.until(lambda: len(second.gateway.keys))
    return first, second


async def node_of_both(first, second, name, role, kv=None, **options):
    """A node with a stream to each, as ours hold them; a fake one is a process for each gateway."""
    nodes = []
    for one in (first, second):
        node = FakeNode(one.url, name, role, one.info, kv=role is Role.PREFILL if kv is None else kv, **options)
        node.join = msgspec.structs.replace(node.join, siblings=True)
        one.nodes.append(await node.start())
        nodes.append(node)
    return nodes


async def served(one, key=None, **body):
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return await one.complete(headers=headers, **body)


async def test_a_request_to_one_is_explained_and_listed_by_the_other(both):
    first, second = both
    await node_of_both(first, second, "d", Role.DECODE)
    answer = await served(first)
    assert answer.status_code == 200, answer.text
    name = answer.headers["x-request-id"]

    for _ in range(100):
        if (await second.client.get(f"/v1/decisions/{name}")).status_code == 200:
            break
        await asyncio.sleep(0.05)
    listed = (await second.client.get("/v1/decisions")).json()["decisions"]
    assert [record["request_id"] for record in listed] == [name]


async def test_operators_find_the_same_on_both_and_a_change_is_an_answer_late_at_most(both):
    first, second = both
    made = await first.client.post("/v1/clusters", json={"name": "east", "dial": "in", "operator": "ops"})
    assert made.status_code == 201, made.text
    await second.until(lambda: any(c.name == "east" for c in second.gateway.registry.clusters))
    again = await second.client.post("/v1/clusters", json={"name": "east", "dial": "in", "operator": "ops"})
    assert again.status_code == 409
    put = await second.client.put("/v1/tenants/blue", json={"weight": 3.0})
    assert put.status_code == 200
    await first.until(lambda: "blue" in str(first.gateway.state.rows("tenants")))
    status = (await second.client.get("/v1/status")).json()["shared"]
    assert [one["leads"] for one in sorted(status["gateways"], key=lambda one: one["url"])] == [True, False]


async def test_a_change_is_answered_once_it_holds_on_all_that_live(both, monkeypatch):
    first, second = both
    held, go_on = asyncio.Event(), asyncio.Event()
    follow = second.gateway.shared._rows.follow

    async def slow(*heard):
        held.set()
        await go_on.wait()
        await follow(*heard)

    monkeypatch.setattr(second.gateway.shared._rows, "follow", slow)
    asked = asyncio.create_task(first.client.post("/v1/keys", json={"role": "client", "name": "late"}))
    await held.wait()
    done, _ = await asyncio.wait([asked], timeout=0.3)
    assert not done
    go_on.set()
    answer = await asked
    assert answer.status_code == 201, answer.text
    assert second.gateway.keys.find(answer.json()["key"])
    gone = await first.client.delete(f"/v1/keys/{answer.json()['id']}")
    assert gone.status_code == 200, gone.text
    assert second.gateway.keys.find(answer.json()["key"]) is None


async def test_who_changes_something_waits_for_the_dead_no_longer_than_their_lease(both, redis):
    first, second = both
    for task in second.gateway.shared._tasks:
        task.cancel()
    began = time.monotonic()
    made = await first.client.post("/v1/keys", json={"role": "client", "name": "late"})
    assert made.status_code == 201, made.text
    assert time.monotonic() - began < 4.0
    await first.until(lambda: first.gateway.shared.gateways == 1)


async def test_a_removed_cluster_is_removed_everywhere_and_its_nodes_are_dismissed(both):
    first, second = both
    await first.client.post("/v1/clusters", json={"name": "east", "dial": "in", "operator": "ops"})
    await second.until(lambda: any(c.name == "east" for c in second.gateway.registry.clusters))
    nodes = await node_of_both(first, second, "p", Role.PREFILL, cluster="east")
    gone = await first.client.delete("/v1/clusters/east")
    assert gone.status_code == 200, gone.text
    await second.until(lambda: all(node.refused is not None for node in nodes))


async def test_a_cluster_that_audits_flag_on_one_is_drained_on_both_and_stays_so(both):
    first, second = both
    assert (await first.client.post("/v1/clusters", json={"name": "east"})).status_code == 201
    await second.until(lambda: any(one.name == "east" for one in second.gateway.registry.clusters))
    node = await FakeNode(second.url, "d", Role.DECODE, second.info, kv=False).start()
    second.nodes.append(node)
    asked = Served("east", "p", second.gateway.registry.node("d"), (1, 2), "", "", exact=True)
    audits = second.gateway._audits
    for number in range(3):
        audits._asked[str(number)] = asked
        audits.answered(asked.decode, KvAudited(str(number), 64, 1.0))
    for one in both:
        await one.until(lambda one=one: one.gateway.registry.cluster("east").security.flagged)
    await first.client.post("/v1/clusters", json={"name": "west"})
    for one in both:
        await one.until(lambda one=one: any(each.name == "west" for each in one.gateway.registry.clusters))
        assert one.gateway.registry.cluster("east").state is ClusterState.DRAINING


async def test_revoked_credentials_are_dismissed_by_both(both):
    first, second = both
    token = (await first.client.post("/v1/clusters", json={"name": "east"})).json()["join_token"]
    await second.until(lambda: any(one.name == "east" for one in second.gateway.registry.clusters))
    await node_of_both(first, second, "p", Role.PREFILL, cluster="east", token=token)
    session = second.gateway.registry.node("p")
    answer = await first.client.post("/v1/clusters/east/rotate", json={"revoke": True})
    assert answer.status_code == 200
    await second.until(lambda: session.lost is not None)
    assert session.lost == "credentials_revoked"
    with pytest.raises(websockets.InvalidStatus):
        await FakeNode(second.url, "p", Role.PREFILL, second.info, cluster="east", token=token).start()


async def test_a_gateway_that_does_not_belong_to_the_others_or_whose_clock_is_off_says_so(both, monkeypatch):
    first, second = both
    mine = second.gateway.shared._parts
    other = msgspec.structs.replace(mine.common(), model="another")
    second.gateway.shared._parts = replace(mine, common=lambda: other)
    for task in second.gateway.shared._tasks:
        task.cancel()
    second.gateway.shared.start(second.url, second.gateway.shared._parts)
    await first.until(lambda: first.gateway.shared.trouble)
    ready = (await first.client.get("/ready")).json()
    assert "serves another model over the same Redis" in ready["degraded"]
    monkeypatch.setattr(roster, "time", lambda: time.time() + 300)
    await first.until(lambda: "300 s ahead of" in (first.gateway.shared.trouble or ""))
    metrics = (await first.client.get("/metrics")).text
    assert "prfaas_clock_ahead_seconds 300" in metrics or "prfaas_clock_ahead_seconds 299.9" in metrics


async def test_either_audit_log_tells_what_was_asked_of_both(both, redis):
    first, second = both

    async def asked(one, name):
        assert (await one.client.put(f"/v1/tenants/{name}", json={"weight": 2.0})).status_code == 200

    async def told(one):
        entries = (await one.client.get("/v1/audit?limit=1000")).json()["entries"]
        return [entry["action"].removeprefix("PUT /v1/tenants/") for entry in entries]

    await asked(first, "one")
    await asked(second, "two")
    for one in both:
        await one.until(lambda one=one: len(one.gateway.audit.recent(9)) == 2)
        assert await told(one) == ["two", "one"]
    before = first.gateway.shared._rows.follows
    redis.say("FLUSHALL")
    for one in both:
        await one.until(lambda one=one: one.gateway.shared._rows.follows[0] != before[0])
    await asked(second, "three")
    await first.until(lambda: len(first.gateway.audit.recent(9)) == 3)
    assert await told(first) == ["three", "two", "one"]


async def test_a_budget_is_one_over_both_and_stays_where_its_key_could_not_be_revoked(both, redis):
    first, second = both
    await node_of_both(first, second, "d", Role.DECODE)
    made = await first.client.post("/v1/keys", json={"role": "client", "token_budget": 8})
    key, path = made.json()["key"], f"/v1/keys/{made.json()['id']}"
    used = (await served(first, key)).json()["usage"]["total_tokens"]
    assert used >= 8
    await second.until(lambda: first.gateway._budgets._unwritten == {})
    refused = await served(second, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert (await second.client.get(path)).json()["tokens_used"] == used
    redis.kill()
    assert (await first.client.delete(path)).status_code == 503
    redis.restart()
    await first.until(lambda: first.gateway.shared.link.up)
    assert (await served(first, key)).status_code == 429
    for _ in range(100):
        gone = await first.client.delete(path)
        if gone.status_code == 200:
            break
        await asyncio.sleep(0.05)
    for one in both:
        await one.until(lambda one=one: one.gateway.state.execute("SELECT * FROM counters WHERE name LIKE 'b%'") == [])


async def test_limits_of_a_key_hold_over_both(both):
    first, second = both
    await node_of_both(first, second, "d", Role.DECODE, on_generate=never)
    async with first.gateway.shared.writing():
        _, key = first.gateway.keys.create("c", KeyRole.CLIENT, limits=KeyLimits(concurrency=3))
    await second.until(lambda: second.gateway.keys.find(key))
    asked, pending = [], set()
    for _ in range(10):  # one that finds no slot at once finds the free one soon
        asked += [asyncio.create_task(served(one, key)) for one in (first, second) for _ in range(4)]
        done, pending = await asyncio.wait(asked, timeout=0.5)
        if len(pending) > 3:  # a busy machine has not answered all of them yet
            done, pending = await asyncio.wait(asked, timeout=3.0)
        assert len(pending) <= 3
        assert {task.result().status_code for task in done} == {429}
        if len(pending) == 3:
            break
    assert len(pending) == 3
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def test_nodes_are_told_of_the_other_gateway_and_who_comes_twice_is_told_so(both):
    first, second = both
    (node, _) = await node_of_both(first, second, "d", Role.DECODE)
    await first.until(lambda: node.jobs(Siblings))
    assert node.jobs(Siblings)[-1].urls == ("http://127.0.0.1:1/b",)
    twice = FakeNode(first.url, "d", Role.DECODE, first.info, kv=False)
    known = (node.welcome.gateway,)
    twice.join = msgspec.structs.replace(node.join, gateways=known)
    async with websockets.connect(twice.url) as stream:
        await stream.send(control.encode(twice.join))
        assert control.decode_to_node(await stream.recv()) == Already(node.welcome.gateway)
    assert first.gateway.registry.node("d") is not None
    assert (await served(first)).status_code == 200


async def test_only_the_leader_converts_and_the_other_gives_the_node_no_work_meanwhile(both):
    first, second = both
    decoders = await node_of_both(first, second, "d", Role.DECODE, kv=True, on_generate=never)
    held = asyncio.create_task(served(first))
    await first.until(lambda: first.gateway.registry.node("d").jobs)
    await node_of_both(first, second, "spare", Role.DECODE, kv=True)
    refused = await second.client.post("/v1/nodes/d/role", json={"role": "prefill"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_leader")
    assert "http://127.0.0.1:1/a" in refused.json()["error"]["message"]
    begun = await first.client.post("/v1/nodes/d/role", json={"role": "prefill"})
    assert begun.status_code == 202, begun.text
    await second.until(lambda: second.gateway.registry.node("d").becoming is Role.PREFILL)
    assert not second.gateway.registry.node("d").accepting
    assert not [o for node in decoders for o in node.orders if isinstance(o, ChangeRole)]
    listed = (await second.client.get("/v1/conversions")).json()["conversions"]
    assert [one["node_id"] for one in listed] == ["d"]
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)


async def test_the_other_leads_when_the_leader_goes_and_ends_what_it_left(both):
    first, second = both
    history = first.gateway.rebalancing.history
    history.begin(ConversionRecord(0, "d", "decode", "prefill", 1, time.time(), Phase.DRAINING, "", "x"))
    await second.until(lambda: second.gateway.rebalancing.history.conversions())
    await first.gateway.shared.stop()
    await second.until(lambda: second.gateway.shared.leadership.leads)
    await second.until(lambda: second.gateway.rebalancing.history.conversions()[0].phase is Phase.INTERRUPTED)


async def test_without_redis_requests_are_served_and_changes_refused_and_it_comes_back(both, redis):
    first, second = both
    await node_of_both(first, second, "d", Role.DECODE)
    redis.kill()
    try:
        await first.until(lambda: first.gateway.shared.trouble and second.gateway.shared.trouble)
        for one in both:
            assert (await served(one)).status_code == 200
            ready = await one.client.get("/ready")
            assert ready.status_code == 200
            assert "Redis at redis://127.0.0.1" in ready.json()["degraded"]
            assert "prfaas_redis_up 0.0" in (await one.client.get("/metrics")).text
        refused = await first.client.post("/v1/keys", json={"role": "client"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_unavailable")
        assert "retry-after" in refused.headers
        assert len(first.gateway.keys) == 1
    finally:
        redis.restart()
    await first.until(lambda: not first.gateway.shared.trouble and not second.gateway.shared.trouble, 10.0)
    made = await second.client.post("/v1/keys", json={"role": "client"})
    assert made.status_code == 201, made.text
    await first.until(lambda: len(first.gateway.keys) == 2)


async def test_a_stalled_redis_holds_up_nobody(both, redis):
    first, second = both
    await node_of_both(first, second, "d", Role.DECODE)
    async with first.gateway.shared.writing():
        _, key = first.gateway.keys.create("c", KeyRole.CLIENT, limits=KeyLimits(requests_per_minute=6000))
    redis.stall()
    try:
        slowest, answers = 0.0, []
        for _ in range(40):
            began = time.monotonic()
            answers.append((await served(first, key)).status_code)
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.05)
        assert set(answers) == {200}
        assert slowest < 0.5
    finally:
        redis.go_on()
