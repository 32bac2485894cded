"""Lanes through NIXL: the rings and their words with an agent made up here, and the real one where it is installed."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import pytest_asyncio

from kvcache.control import KvAddress
from kvcache.topology import MachineReport, NetPort, RdmaPort
from kvcache.transport import KvEndpoint, LaneFailed, Peer, nixl_agent, nixl_lane
from kvcache.transport.nixl_agent import NixlAgent, NixlMissing, split
from kvcache.transport.nixl_lane import RING_BYTES, NixlCarrier, Offer, agent_name
from kvcache.transport.ucx import ucx_settings
from kvcache.wire import Lane
from tests.bench.transport_pair import transport_pair
from tests.kvcache.kvnet import QUICK, Recorder, data, local, soon, until, who


class MadeUpAgent:
    """NIXL within one process: agents find each other by name, and a write is a copy of memory."""

    agents: ClassVar[dict[str, MadeUpAgent]] = {}
    broken = False

    def __init__(self, name: str, config: object) -> None:
        self.name, self.notes, self.peers = name, list[tuple[str, bytes]](), set[str]()
        self.settings = os.environ.get("UCX_TLS")
        self.registered = 0
        MadeUpAgent.agents[name] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> int:
        self.registered += 1
        return self.registered

    def deregister_memory(self, region: int) -> None:
        self.registered -= 1

    def get_partial_agent_metadata(self, region: object, connect: bool, backends: list[str]) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.peers.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def send_notif(self, peer: str, message: bytes) -> None:
        if peer in self.peers:
            MadeUpAgent.agents[peer].notes.append((self.name, message))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        while self.notes:
            peer, message = self.notes.pop(0)
            found.setdefault(peer, []).append(message)
        return found

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> tuple[int, int]:
        return regions[0][:2]

    def initialize_xfer(self, kind: str, here: tuple[int, int], there: tuple[int, int], peer: str, note: bytes) -> Any:
        return here, there, peer, note

    def transfer(self, handle: Any) -> str:
        (here, count), (there, _), peer, note = handle
        if not MadeUpAgent.broken:
            ctypes.memmove(there, here, count)
            self.send_notif(peer, note)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return "ERR" if MadeUpAgent.broken else "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        """Nothing is held."""


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpAgent]:
    module = SimpleNamespace(nixl_agent=MadeUpAgent, nixl_agent_config=lambda **options: options)
    monkeypatch.setattr(nixl_agent, "find_nixl", lambda: module)
    monkeypatch.setattr(MadeUpAgent, "agents", {})
    monkeypatch.setattr(MadeUpAgent, "broken", False)
    return MadeUpAgent


class Ends:
    def __init__(self) -> None:
        self.on_a, self.on_b = Recorder(), Recorder()
        self.a, self.b = (KvEndpoint(local(n), on, limits=QUICK) for n, on in (("a", self.on_a), ("b", self.on_b)))
        self.carriers = [NixlCarrier("rdma", agent_name(name, "1"), {"UCX_TLS": "made,up"}) for name in "ab"]

    async def connect(self) -> tuple[Peer, Peer]:
        port = await self.b.listen("127.0.0.1", 0)
        at_a = await self.a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
        return at_a, await self.b.peer(who("a"), None, soon())


@pytest_asyncio.fixture
async def ends(made_up: type[MadeUpAgent]) -> AsyncIterator[Ends]:
    both = Ends()
    for endpoint, carrier in zip((both.a, both.b), both.carriers, strict=True):
        assert endpoint.open_lanes([carrier]) == ("rdma", "tcp")
    yield both
    await both.a.close()
    await both.b.close()
    assert [agent.registered for agent in made_up.agents.values()] == [0, 0]


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 2 * RING_BYTES + 77])
async def test_what_is_submitted_for_a_lane_arrives_over_it(ends: Ends, nbytes: int) -> None:
    at_a, at_b = await ends.connect()
    lanes = await ends.a.lanes(at_a, "rdma")
    payload = os.urandom(nbytes)
    items = [at_a.submit(data(seq, nbytes), [payload], only=lanes) for seq in range(3)]
    await until(lambda: len(ends.on_b.arrived) == 3)
    assert [bytes(memory) for memory in ends.on_b.memory.values()] == [payload] * 3
    assert {item.carrier for item in items} == set(lanes)
    back = at_b.lanes("rdma")
    at_b.submit(data(0, nbytes), [payload], only=back)
    await until(lambda: ends.on_a.arrived)
    assert [bytes(memory) for memory in ends.on_a.memory.values()] == [payload]


async def test_a_write_that_fails_ends_the_lane_and_the_peer_stays(ends: Ends, made_up: type[MadeUpAgent]) -> None:
    at_a, _ = await ends.connect()
    (lane,) = await ends.a.lanes(at_a, "rdma")
    made_up.broken = True
    item = at_a.submit(data(0, 3 * RING_BYTES), [bytes(3 * RING_BYTES)], only=(lane,))
    await until(lambda: not lane.alive)
    await until(lambda: item.carrier is not None)
    assert at_a.alive
    made_up.broken = False
    assert (await ends.a.lanes(at_a, "rdma"))[0].alive


def changed(frame: Lane, **fields: Any) -> Lane:
    offer = msgspec.structs.replace(msgspec.msgpack.decode(frame.offer, type=Offer), **fields)
    return msgspec.structs.replace(frame, offer=msgspec.msgpack.encode(offer))


@pytest.mark.parametrize(
    "fields",
    [{"nbytes": 2 * RING_BYTES}, {"nbytes": 0}, {"metadata": b"c.1"}, {"metadata": bytes(1 << 17)}, {"token": b"s"}],
    ids=["too large", "empty", "another agent", "long", "no token"],
)
async def test_an_offer_that_cannot_be_the_peers_makes_no_lane(
    ends: Ends, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_lane, "ANSWER_S", 0.3 if "token" in fields else 60.0)
    at_a, at_b = await ends.connect()
    send = at_a.send
    at_a.send = lambda frame: send(changed(frame, **fields) if isinstance(frame, Lane) else frame)  # type: ignore[method-assign]
    with pytest.raises(LaneFailed):
        await ends.a.lanes(at_a, "rdma")
    assert at_b.lane_count == 0
    assert at_b.alive


async def test_rubbish_and_answers_that_nobody_asked_for_are_nothing(ends: Ends) -> None:
    at_a, at_b = await ends.connect()
    for offer in (b"", b"\xc1", msgspec.msgpack.encode(Offer(bytes(16), b"a.1", 0, RING_BYTES, answer=True))):
        at_a.send(Lane("rdma", offer))
    at_a.send(Lane("telepathy", b""))
    await asyncio.sleep(0.05)
    assert (at_b.lane_count, at_b.alive) == (0, True)


async def test_settings_reach_ucx_and_leave_the_environment_as_it_was(ends: Ends, made_up: type[MadeUpAgent]) -> None:
    assert {agent.settings for agent in made_up.agents.values()} == {"made,up"}
    assert "UCX_TLS" not in os.environ


async def test_without_nixl_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MODULES", ("nixl_that_is_not_there",))
    with pytest.raises(NixlMissing, match=r"pip install 'prfaas\[nixl\]'"):
        NixlAgent("a", {})


def test_settings_follow_from_the_active_ports() -> None:
    ports = (RdmaPort("mlx5_0", 1, True), RdmaPort("mlx5_1", 1, False), RdmaPort("mlx5_2", 2, True))
    found = ucx_settings(MachineReport(rdma=ports, net=(NetPort("eth0"),)))
    assert found == {"UCX_TLS": "rc,ud,tcp", "UCX_NET_DEVICES": "mlx5_0:1,mlx5_2:2,eth0"}
    assert ucx_settings(MachineReport(rdma=ports[1:2])) is None


def test_ranges_are_written_in_pieces_that_keep_the_other_side_awake() -> None:
    assert split([(5, 0), (0, (2 << 20) + 1)]) == [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 1)]


real = pytest.mark.skipif(
    not any(importlib.util.find_spec(name.split(".")[0]) for name in nixl_agent.MODULES), reason="NIXL is not installed"
)


@real
@pytest.mark.timeout(90)
async def test_two_processes_with_real_agents_move_kv_that_verifies() -> None:
    async with transport_pair(("nixl",), 8 << 20) as pair:
        done = await pair.fetch("nixl")
        assert done.verified
        assert done.report.transport == "nixl"
