"""What nodes report of links reaches decisions and operators; an idle link is probed while somebody asks for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from msgspec import structs

from kvcache.control import LinkReport, ProbeLink
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode

LINK = LinkReport("d", 0.03, 0.0, 0, 0, 0, connections=4, least_rtt_s=0.03)


@dataclass
class Cast:
    """A remote cluster whose link was seen to do 1 GB/s, and its nodes."""

    stage: Stage
    prefill: FakeNode
    decode: FakeNode

    @property
    def probes(self) -> list[ProbeLink]:
        return self.prefill.jobs(ProbeLink)

    async def view(self) -> dict[str, object]:
        answer = await self.stage.client.get("/v1/clusters/east")
        found: dict[str, object] = answer.json()["link"]
        return found


async def cast(stage: Open, probes: bool = True, **told: object) -> Cast:
    one = await stage()
    one.register("east")
    prefill = await one.node("p", Role.PREFILL, cluster="east", probes=probes)
    decode = await one.node("d", Role.DECODE)
    link = one.gateway.registry.link("east")
    link.observe(10**9, 1.0, 1.0, asyncio.get_running_loop().time())
    prefill.links = (structs.replace(LINK, **told),)
    return Cast(one, prefill, decode)


async def test_what_a_sender_reports_lowers_the_rate_and_operators_see_it(stage: Open) -> None:
    it = await cast(stage, at_most_bytes_per_s=2e6, at_least_bytes_per_s=2e6)
    link = it.stage.gateway.registry.link("east")
    await it.stage.until(lambda: (link.bytes_per_s or 0) < 3e6)
    view = await it.view()
    assert view["rtt_s"] == pytest.approx(0.03)
    assert (view["dead"], view["queueing_s"], view["probe_bytes"]) == (False, 0.0, 0)
    metrics = (await it.stage.client.get("/metrics")).text
    assert 'prfaas_link_rtt_seconds{cluster="east"} 0.03' in metrics
    assert 'prfaas_link_probe_bytes_total{cluster="east"} 0.0' in metrics
    assert 'prfaas_link_loss{cluster="east"}' not in metrics, "never measured"
    await it.stage.until(lambda: link.facts(asyncio.get_running_loop().time()).congested)
    assert 'prfaas_link_congested{cluster="east"} 1.0' in (await it.stage.client.get("/metrics")).text


async def test_a_link_on_which_nothing_moves_is_shown_dead(stage: Open) -> None:
    it = await cast(stage, stalled_s=3.0)
    await it.stage.until(lambda: it.stage.gateway.registry.link("east").dead(asyncio.get_running_loop().time()))
    view = await it.view()
    assert (view["dead"], view["bytes_per_s"]) == (True, 0.0)


async def test_an_idle_link_is_probed_while_decisions_ask_for_it_by_a_node_that_can(stage: Open) -> None:
    it = await cast(stage)
    await asyncio.sleep(1.0)
    assert not it.probes, "nobody has asked"
    await it.stage.complete(headers={"x-prfaas-route-hint": "remote"})
    await it.stage.until(lambda: it.probes)
    probe = it.probes[0]
    assert probe.peer_node == "d"
    assert 64 << 10 <= probe.nbytes <= 2 << 20
    assert (await it.view())["probe_bytes"] == sum(each.nbytes for each in it.probes)


@pytest.mark.parametrize("why", ["older", "unconnected"])
async def test_a_node_that_knows_no_probes_or_has_no_connection_is_not_asked_for_one(stage: Open, why: str) -> None:
    it = await cast(stage, probes=why != "older", connections=0 if why == "unconnected" else 4)
    await it.stage.complete(headers={"x-prfaas-route-hint": "remote"})
    await asyncio.sleep(2.5)
    assert not it.probes


async def test_the_way_out_to_a_cluster_is_learnt_from_local_nodes_and_probed_by_one_where_a_prefix_could_move(
    stage: Open,
) -> None:
    it = await cast(stage)
    prober = await it.stage.node("d2", Role.DECODE, probes=True)
    out = it.stage.gateway.registry.outward("east")
    prober.links = (structs.replace(LINK, peer_node="p", at_most_bytes_per_s=5e6, at_least_bytes_per_s=5e6),)
    await it.stage.until(lambda: out.bytes_per_s == pytest.approx(5e6))
    found = out.facts(asyncio.get_running_loop().time())
    assert (found.utilisation, found.fresh, found.rtt_s) == (0.0, True, pytest.approx(0.03))
    await it.stage.complete(headers={"x-prfaas-route-hint": "remote"})
    await it.stage.until(lambda: it.probes)
    assert not prober.jobs(ProbeLink), "nothing is cached that could be sent there"
    long = {"prompt": [5] * 100, "headers": {"x-prfaas-route-hint": "remote"}}
    for _ in range(2):
        await it.stage.complete(**long)
    await it.stage.until(lambda: prober.jobs(ProbeLink))
    assert prober.jobs(ProbeLink)[0].peer_node == "p"


async def test_the_first_estimate_of_the_way_out_is_what_a_probe_saw_it_do_at_least(stage: Open) -> None:
    it = await cast(stage)
    out = it.stage.gateway.registry.outward("east")
    acks, probe = ({"at_least_bytes_per_s": rate} for rate in (1e5, 6e6))
    it.decode.links = (structs.replace(LINK, peer_node="p", **acks),)
    await asyncio.sleep(0.5)
    assert out.bytes_per_s is None, "acknowledgements alone say nothing"
    it.decode.links = (structs.replace(LINK, peer_node="p", **probe),)
    await it.stage.until(lambda: out.bytes_per_s == 6e6)
    it.decode.links = (structs.replace(LINK, peer_node="p", **acks),)
    await asyncio.sleep(0.5)
    assert out.bytes_per_s == 6e6, "to have sent little lowers nothing"
