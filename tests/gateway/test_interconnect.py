"""What nodes say of their machines becomes one graph; what cannot be so is refused by name and keeps nobody out."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner

from gateway.commands.operate import nodes
from kvcache.control import LinkReport
from kvcache.topology import MAX_REPORT_BYTES, GpuLink, Via, encode_report
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.scheduler.topology.machines import TCP, machine


async def seen(stage: Stage, cluster: str = "local") -> dict[str, Any]:
    answer = await stage.client.get("/v1/topology")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["clusters"].get(cluster, {})
    return found


async def pair(stage: Open, prefill: bytes, decode: bytes) -> Stage:
    one = await stage()
    await one.node("p", Role.PREFILL, topology=prefill)
    await one.node("d", Role.DECODE, topology=decode)
    return one


def ways(found: dict[str, Any], between: str) -> list[str]:
    return [way["transport"] for way in found["routes"][0][between]]


async def test_two_nodes_on_one_machine_have_its_ways_and_lose_them_when_one_leaves(stage: Open) -> None:
    report = encode_report(machine("m"))
    one = await pair(stage, report, report)
    found = await seen(one)
    assert set(found["machines"]) == {"p", "d"}
    assert ways(found, "host_memory") == ["shm", "tcp"]
    assert found["routes"][0]["order"] == ["tcp"]  # the nodes have nothing else
    await one.nodes[0].stop()
    await one.until(lambda: one.gateway.registry.node("p") is None)
    assert set((await seen(one))["machines"]) == {"d"}


async def test_machines_with_rdma_have_it_before_tcp_and_nodes_that_say_nothing_have_tcp(stage: Open) -> None:
    one = await pair(stage, encode_report(machine("a")), encode_report(machine("b")))
    found = await seen(one)
    assert ways(found, "gpus") == ways(found, "host_memory") == ["rdma", "tcp"]
    await one.node("silent", Role.DECODE)
    routes = {route["to"]: route for route in (await seen(one))["routes"]}
    assert [way["transport"] for way in routes["silent"]["host_memory"]] == ["tcp"]
    assert routes["silent"]["gpus"] is None


@pytest.mark.parametrize(
    ("data", "field", "word"),
    [
        (b"\xc1", "topology", "cannot be read"),
        (bytes(MAX_REPORT_BYTES + 1), "topology", "more than"),
        (
            encode_report(msgspec.structs.replace(machine("m"), gpu_links=(GpuLink(0, 7, Via.PIX),))),
            "link 0-7",
            "unknown peer",
        ),
        (encode_report(machine("m", rack="r2")), "place.rack", "'d' on the same machine"),
    ],
    ids=["rubbish", "too long", "unknown peer", "contradiction"],
)
async def test_what_cannot_be_so_is_refused_by_name_and_the_node_serves(
    stage: Open, data: bytes, field: str, word: str
) -> None:
    one = await stage()
    await one.node("d", Role.DECODE, topology=encode_report(machine("m", rack="r1")))
    await one.node("p", Role.PREFILL, topology=data)
    found = await seen(one)
    assert [(each["node"], each["field"]) for each in found["refused"]] == [("p", field)]
    assert word in found["refused"][0]["reason"]
    assert set(found["machines"]) == {"d"}
    assert ways(found, "host_memory") == ["tcp"]
    assert (await one.complete()).status_code == 200


async def test_what_the_kernel_delivers_corrects_the_cost_of_tcp(stage: Open) -> None:
    one = await pair(stage, encode_report(machine("a")), encode_report(machine("b")))
    link = LinkReport("d", 0.0, 0.0, 0, 0, 0, delivery_bytes_per_s=TCP / 10, app_limited=False)
    one.nodes[0].links = (link,)
    await one.nodes[0].heartbeat()
    await one.nodes[0].heartbeat()
    await asyncio.sleep(0.05)
    way = next(w for w in (await seen(one))["routes"][0]["host_memory"] if w["transport"] == "tcp")
    assert way["slowdown"] > 3
    assert way["cost_s"] == pytest.approx(way["nominal_s"] * way["slowdown"])


async def test_what_was_never_the_ways_own_limit_corrects_nothing(stage: Open) -> None:
    one = await pair(stage, encode_report(machine("a")), encode_report(machine("b")))
    one.nodes[0].links = (LinkReport("d", 0.0, 0.0, 0, 0, 0, delivery_bytes_per_s=TCP / 10, app_limited=True),)
    await one.nodes[0].heartbeat()
    await asyncio.sleep(0.05)
    assert {way["slowdown"] for way in (await seen(one))["routes"][0]["host_memory"]} == {1.0}


async def test_a_node_that_comes_back_on_a_new_stream_keeps_its_place_in_the_graph(stage: Open) -> None:
    one = await pair(stage, encode_report(machine("a")), encode_report(machine("b")))
    earlier = one.gateway.registry.node("p")
    await one.nodes[0].start()
    await one.until(lambda: one.gateway.registry.node("p") is not earlier)
    await asyncio.sleep(0.1)
    assert set((await seen(one))["machines"]) == {"p", "d"}


async def test_the_command_prints_ways_and_refusals(stage: Open) -> None:
    one = await pair(stage, encode_report(machine("a")), b"\xc1")
    url = str(one.client.base_url)
    done = await asyncio.to_thread(CliRunner().invoke, nodes, ["routes", "--gateway", url])
    assert done.exit_code == 0, done.output
    assert "nothing is known of d's machine" in done.output
    assert "refused: local d: topology: cannot be read" in done.output


async def test_a_transfer_of_nothing_is_no_question(stage: Open) -> None:
    one = await stage()
    answer: httpx.Response = await one.client.get("/v1/topology?bytes=0")
    assert answer.status_code == 400
