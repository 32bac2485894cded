"""The long-term loop in a gateway: what it sees, what it proposes, what a person decides, and what it then does."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway.keys import Role as KeyRole
from gateway.observing import Observer
from gateway.traffic import TrafficMeter
from kvcache.control import ChangeRole
from kvcache.wire import Role
from scheduler.controller.observation import Stage as Does
from scheduler.controller.settings import Mode
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode
from tests.gateway.test_conversions import ended, three


class Loop:
    """The stage's loop, stepped by hand: long prompts, short answers, more than one prefill node can take."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.rebalancing = stage.gateway.rebalancing
        self.meter: TrafficMeter = self.rebalancing._observer._meter
        self.now = time.monotonic()
        self.count = 0

    def step(self, requests: int = 40, tokens: int = 2000, output: int = 4) -> None:
        for _ in range(requests):
            self.count += 1
            answer = f"a{self.count}"
            self.meter.arrived(tokens)
            self.meter.spoke(answer, output, self.now)
            self.meter.ended(answer, True)
        self.now += 10.0
        self.rebalancing.step(self.now)


async def looped(stage: Open, mode: Mode) -> tuple[Loop, FakeNode, FakeNode, FakeNode]:
    one = await stage(rebalance=mode)
    nodes = await three(one)
    loop = Loop(one)
    for _ in range(4):
        loop.step()
    return loop, *nodes


async def plans(stage: Stage) -> dict[str, Any]:
    answer = await stage.client.get("/v1/plans/proposals")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_observe_says_what_it_would_do_and_does_nothing(stage: Open) -> None:
    loop, _, d1, d2 = await looped(stage, Mode.OBSERVE)
    found = await plans(loop.stage)
    assert found["mode"] == "observe"
    assert [one["verdict"] for one in found["proposals"]] == ["observed"]
    assert (found["proposals"][0]["prefill_now"], found["proposals"][0]["prefill"]) == ([1], [2])
    assert found["assessment"]["bottleneck"] == "prefill"
    assert any(
        action["what"] == "observed" and "prefill is full first" in action["reason"] for action in found["actions"]
    )
    assert not d1.jobs(ChangeRole)
    assert not d2.jobs(ChangeRole)
    refused = await loop.stage.client.post(f"/v1/plans/proposals/{found['proposals'][0]['number']}/approve")
    assert refused.status_code == 404


async def test_advise_converts_once_a_person_approves(stage: Open) -> None:
    loop, *_ = await looped(stage, Mode.ADVISE)
    proposal = (await plans(loop.stage))["proposals"][0]
    assert proposal["verdict"] == "open"
    assert not (await loop.stage.client.get("/v1/conversions")).json()["conversions"]
    approved = await loop.stage.client.post(f"/v1/plans/proposals/{proposal['number']}/approve")
    assert (approved.json()["verdict"], approved.json()["decided_by"]) == ("approved", "loopback")
    loop.step()
    record = (await loop.stage.client.get("/v1/conversions")).json()["conversions"][0]
    done = await ended(loop.stage, record["id"])
    assert (done["phase"], done["role_to"], done["by"], done["proposal"]) == (
        "done",
        "prefill",
        "controller",
        proposal["number"],
    )
    assert done["figures"]["gain"] > 1.5
    assert len(loop.stage.gateway.registry.nodes("local", Role.PREFILL)) == 2
    loop.step()
    assert (await plans(loop.stage))["proposals"][0]["verdict"] == "done"


async def test_a_refused_proposal_does_not_come_back(stage: Open) -> None:
    loop, *_ = await looped(stage, Mode.ADVISE)
    number = (await plans(loop.stage))["proposals"][0]["number"]
    refused = await loop.stage.client.post(f"/v1/plans/proposals/{number}/refuse")
    assert refused.json()["verdict"] == "refused"
    for _ in range(5):
        loop.step()
    assert [one["number"] for one in (await plans(loop.stage))["proposals"]] == [number]
    again = await loop.stage.client.post(f"/v1/plans/proposals/{number}/refuse")
    assert again.json()["error"]["code"] == "proposal_not_found"


async def test_auto_converts_by_itself_and_sets_the_threshold(stage: Open) -> None:
    loop, *_ = await looped(stage, Mode.AUTO)
    record = (await loop.stage.client.get("/v1/conversions")).json()["conversions"][0]
    assert (await ended(loop.stage, record["id"]))["phase"] == "done"
    status = (await loop.stage.client.get("/v1/status")).json()
    assert 2000 <= status["threshold_tokens"] < 2050  # no cluster to offload to: all stay


async def test_replicas_and_gauges_are_there_once_traffic_was_seen(stage: Open) -> None:
    one = await stage()
    await three(one)
    empty = await one.client.get("/v1/plans/replicas")
    assert (empty.status_code, empty.json()["error"]["code"]) == (503, "not_yet_known")
    loop = Loop(one)
    for _ in range(4):
        loop.step()
    # 4 req/s of 2000 tokens at 1000 tokens/s a node are 8 nodes' work, and 10 at a load of 0.8
    found = (await one.client.get("/v1/plans/replicas")).json()
    assert (found["prefill"], found["decode"]) == (10, 1)
    metrics = (await one.client.get("/metrics")).text
    assert 'prfaas_desired_replicas{stage="prefill"} 10.0' in metrics
    assert 'prfaas_capacity_requests_per_second{split="present"} 0.5' in metrics


async def test_who_may_not_operate_changes_nothing(stage: Open) -> None:
    one = await stage()
    await three(one)
    keys = one.gateway.keys
    _, admin = keys.create("root", KeyRole.ADMIN)
    _, planner = keys.create("plan", KeyRole.PLANNER)
    for key, path, status in (
        (planner, "/v1/nodes/d1/role", 403),
        (planner, "/v1/plans/proposals/1/approve", 403),
        (admin, "/v1/plans/proposals/1/approve", 404),
    ):
        answer = await one.client.post(path, json={"role": "prefill"}, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
    read = await one.client.get("/v1/plans/proposals", headers={"authorization": f"Bearer {planner}"})
    assert read.status_code == 200


async def test_a_real_request_is_counted_where_the_loop_looks(stage: Open) -> None:
    one = await stage()
    await three(one)
    assert (await one.complete(words=40)).status_code == 200
    lengths, spoken = Loop(one).meter.take()
    assert lengths == ((await one.client.post("/tokenize", json={"prompt": "ab " * 40})).json()["count"] - 1,)
    assert [(part.tokens, part.ends) for part in spoken] == [(2, 1)]


async def test_what_the_controller_is_told_is_what_the_nodes_say(stage: Open, model: Any) -> None:
    one = await stage()
    one.register("east")
    await three(one)
    await one.node("e", Role.PREFILL, cluster="east", speed=4000.0)
    meter = TrafficMeter()
    meter.arrived(7)
    seen = Observer(one.gateway.registry, meter, model.layout).observe(99, ("x",))
    assert seen is not None
    assert [(n.node_id, n.stage) for n in seen.nodes] == [
        ("d1", Does.DECODE),
        ("d2", Does.DECODE),
        ("p", Does.PREFILL),
    ]
    assert all(n.convertible for n in seen.nodes)
    assert (seen.lengths, seen.failed, seen.threshold) == ((7,), ("x",), 99.0)
    kind = seen.kinds[0]
    assert kind.prefill.seconds(1000.0) == pytest.approx(1.0)
    assert (kind.decode.batch, kind.decode.tokens_per_s) == (8, pytest.approx(240.0))
    assert seen.clusters[0].nodes[0].prefill.seconds(1000.0) == pytest.approx(0.25)
