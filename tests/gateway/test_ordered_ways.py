"""The gateway orders what may carry each transfer, and what nodes say of it afterwards decides the next order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.interconnect import Interconnects
from kvcache.control import GenerateJob, PrefillJob, SharePrefix, TransferDone
from kvcache.topology import encode_report
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import RAW_BYTES, FakeNode, delta, finish, transfer_of
from tests.scheduler.topology.machines import machine

BOTH = ("shm", "tcp")
MIB = 1 << 20


def session(name: str, transports: tuple[str, ...] = BOTH, cluster: str = "local", host: str = "m") -> Any:
    join = SimpleNamespace(cluster=cluster, transports=transports, topology=encode_report(machine(host)))
    return SimpleNamespace(node_id=name, join=join)


def joined(*sessions: Any) -> Interconnects:
    found = Interconnects(SimpleNamespace(node=lambda name: None))  # type: ignore[arg-type]
    for each in sessions:
        found.joined(each)
    return found


def done(transport: str, seconds: float, nbytes: int = 64 * MIB, failed: tuple[str, ...] = ()) -> TransferDone:
    return TransferDone(
        bytes(16),
        nbytes,
        nbytes,
        "raw",
        2 * seconds,
        seconds / 2,
        bytes(16),
        transport=transport,
        backlog_bytes=nbytes // 2,
        failed_transports=failed,
    )


@pytest.mark.parametrize(
    ("source", "target", "ordered"),
    [
        (session("p"), session("d"), BOTH),
        (session("p", ("tcp",)), session("d"), ()),
        (session("p"), session("d", ()), ()),
        (session("p"), session("d", ("shm", "quantum", "tcp")), BOTH),
        (session("p"), session("d", host="n"), ("tcp",)),
        (session("p"), session("d", cluster="east"), ()),
    ],
    ids=["one machine", "one has no memory", "an older node", "an unknown word", "two machines", "two clusters"],
)
def test_only_what_both_nodes_and_the_graph_have_is_ordered(source: Any, target: Any, ordered: tuple[str, ...]) -> None:
    assert joined(source, target).order(source, target, MIB).transports == ordered


def test_a_pair_that_turns_slow_loses_its_place_within_ten_transfers_and_regains_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    source, target = session("p"), session("d")
    ways = joined(source, target)
    seconds = {"shm": 0.02, "tcp": 0.06}

    def transfer() -> str:
        order = ways.order(source, target, 64 * MIB)
        first = order.transports[0]
        order.took(done(first, seconds[first]))
        clock.now += 1
        return first

    before = [transfer() for _ in range(10)]
    assert before[-5:] == ["shm"] * 5
    seconds["shm"] = 0.5
    slow = [transfer() for _ in range(10)]
    assert slow[-1] == "tcp"
    seconds["shm"] = 0.02
    clock.now += 120
    after = [transfer() for _ in range(10)]
    assert after[-5:] == ["shm"] * 5


def test_what_failed_is_put_last_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    source, target = session("p"), session("d")
    ways = joined(source, target)
    figures = ways.order(source, target, MIB).took(done("tcp", 0.01, failed=("shm", "shm", "nvlink")))
    assert figures["transports_failed"] == ["shm"]  # what was not ordered has not failed
    assert ways.order(source, target, MIB).transports == ("tcp", "shm")
    clock.now += 600
    assert ways.order(source, target, MIB).transports == BOTH
    ways.order(source, target, MIB).corrupted()
    assert ways.order(source, target, MIB).transports == ("tcp", "shm")


def test_what_was_not_ordered_teaches_nothing() -> None:
    source, target = session("p"), session("d")
    ways = joined(source, target)
    assert ways.order(source, target, MIB).took(done("nvlink", 100.0))["transport"] == "other"
    assert ways.order(source, target, MIB).transports == BOTH


async def answers(stage: Stage, transport: str, failed: tuple[str, ...] = ()) -> None:
    """Two nodes of one machine, and how the decode node says that its KV came."""

    async def generate(node: FakeNode, job: GenerateJob) -> None:
        assert job.source is not None
        transfer = transfer_of(node, job.source.ticket)
        await node.send(
            TransferDone(
                transfer,
                RAW_BYTES,
                RAW_BYTES,
                "raw",
                0.02,
                0.01,
                bytes(16),
                transport=transport,
                backlog_bytes=RAW_BYTES // 4,
                failed_transports=failed,
            )
        )
        await node.send(delta(job, 300, "t"))
        await finish(node, job, tokens=1)

    report = encode_report(machine("m"))
    await stage.node("p", Role.PREFILL, topology=report, transports=BOTH)
    await stage.node("d", Role.DECODE, topology=report, transports=BOTH, on_generate=generate)


async def test_the_order_goes_with_the_job_and_what_carried_it_is_recorded(stage: Open) -> None:
    one = await stage()
    await answers(one, "shm")
    found = (await one.client.get("/v1/topology")).json()["clusters"]["local"]
    assert found["routes"][0]["order"] == ["shm", "tcp"]
    answer = await one.complete()
    assert answer.status_code == 200
    (job,) = one.nodes[0].jobs(PrefillJob)
    assert job.transports == BOTH
    record = (await one.client.get(f"/v1/decisions/{answer.headers['x-request-id']}")).json()
    (attempt,) = record["attempts"]
    assert attempt["transport"] == "shm"
    assert attempt["transports_failed"] == []
    assert attempt["hidden"] == pytest.approx(0.75)
    metrics = (await one.client.get("/metrics")).text
    assert 'prfaas_kv_transport_total{outcome="carried",transport="shm"} 1.0' in metrics


async def test_a_transport_that_failed_is_not_first_the_next_time(stage: Open) -> None:
    one = await stage()
    await answers(one, "tcp", failed=("shm",))
    for _ in range(2):
        assert (await one.complete()).status_code == 200
    assert [job.transports for job in one.nodes[0].jobs(PrefillJob)] == [BOTH, ("tcp", "shm")]
    await asyncio.sleep(0)
    ways = (await one.client.get("/v1/topology")).json()["clusters"]["local"]["routes"][0]["host_memory"]
    assert {way["transport"]: way["failures_s"] > 0 for way in ways} == {"shm": True, "tcp": False}
    assert not one.nodes[0].jobs(SharePrefix)
