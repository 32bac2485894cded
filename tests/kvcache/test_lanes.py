"""Lanes between endpoints: only beside connections, only for who proves the same key, and only for what is theirs."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection as Pipe

import pytest
import pytest_asyncio

from kvcache.control import KvAddress
from kvcache.session import NONCE_BYTES, Expected, PeerRefused, Session
from kvcache.transport import KvEndpoint, LaneFailed, Peer
from kvcache.transport.greeting import introduce
from kvcache.transport.hostlane import HostCarrier
from kvcache.transport.interface import LocalIdentity
from kvcache.wire import Grant
from tests.kvcache.kvnet import QUICK, Recorder, T, data, key_of, local, send_data, soon, until, who

SHM = "shm"


def carrier(name: str) -> HostCarrier:
    return HostCarrier(key_of(name).public_key().public_bytes_raw())


class Ends:
    """Two endpoints that are connected, with lanes where ``open_lanes`` was called."""

    def __init__(self) -> None:
        self.on_a, self.on_b = Recorder(), Recorder()
        self.a = KvEndpoint(local("a"), self.on_a, limits=QUICK)
        self.b = KvEndpoint(local("b"), self.on_b, limits=QUICK)

    async def connect(self) -> tuple[Peer, Peer]:
        port = await self.b.listen("127.0.0.1", 0)
        at_a = await self.a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
        return at_a, await self.b.peer(who("a"), None, soon())


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    before = len(os.listdir("/proc/self/fd"))
    both = Ends()
    assert both.a.open_lanes([carrier("a")]) == both.b.open_lanes([carrier("b")]) == (SHM, "tcp")
    yield both
    await both.a.close()
    await both.b.close()
    await asyncio.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 9 << 20])
async def test_a_lane_carries_what_is_submitted_for_it_and_nothing_else(ends: Ends, nbytes: int) -> None:
    at_a, at_b = await ends.connect()
    (lane,) = await ends.a.lanes(at_a, SHM)
    payload = os.urandom(nbytes)
    over = [at_a.submit(data(seq, nbytes), [payload], only=(lane,) if seq == 0 else None) for seq in (0, 1)]
    await until(lambda: len(ends.on_b.arrived) == 2)
    assert over[0].carrier is lane
    assert over[1].carrier in at_a.connections
    assert [bytes(ends.on_b.memory[T, seq]) for seq in (0, 1)] == [payload, payload]
    before = lane.figures.sent_bytes
    at_a.send(Grant(T))
    await until(lambda: ends.on_b.frames)
    assert lane.figures.sent_bytes - before < 50  # a ping at most
    assert not any(connection.is_lane for connection in at_b.connections)
    assert len(at_b.lanes(SHM)) == 1


async def test_all_who_want_a_lane_share_one_and_both_sides_use_it(ends: Ends) -> None:
    at_a, at_b = await ends.connect()
    found = await asyncio.gather(*(ends.a.lanes(at_a, SHM) for _ in range(10)))
    assert len(set(found)) == 1
    await until(lambda: at_b.lanes(SHM))
    assert await ends.b.lanes(at_b, SHM) == at_b.lanes(SHM)
    assert at_a.lane_count == at_b.lane_count == 1


async def test_what_a_lost_lane_had_not_carried_is_given_up_and_the_peer_stays(ends: Ends) -> None:
    at_a, at_b = await ends.connect()
    (lane,) = await ends.a.lanes(at_a, SHM)
    await until(lambda: at_b.lanes(SHM))
    at_b.lanes(SHM)[0].pause()
    items = [at_a.submit(data(seq, 3 << 20), [bytes(3 << 20)], only=(lane,)) for seq in range(4)]
    await asyncio.sleep(0.02)
    assert items[-1].carrier is None
    at_b.lanes(SHM)[0].end("pulled")
    await until(lambda: items[-1].carrier is not None)
    assert not items[-1].carrier.alive
    assert ends.on_a.broken
    assert at_a.alive
    assert at_a.connections
    assert await ends.a.lanes(at_a, SHM) != (lane,)  # a new one


async def test_a_lane_ends_with_its_peer(ends: Ends) -> None:
    at_a, at_b = await ends.connect()
    (lane,) = await ends.a.lanes(at_a, SHM)
    await until(lambda: at_b.lanes(SHM))
    at_a.close("over")
    assert not lane.alive
    await until(lambda: not at_b.alive)
    assert at_b.lane_count == 0


async def test_a_node_without_that_transport_or_on_another_host_says_so(ends: Ends) -> None:
    at_a, _ = await ends.connect()
    with pytest.raises(LaneFailed, match="this node has no rdma"):
        await ends.a.lanes(at_a, "rdma")
    await ends.b._lanes.close()
    with pytest.raises(LaneFailed, match="refused"):
        await ends.a.lanes(at_a, SHM)
    assert at_a.lane_count == 0


async def greets(me: LocalIdentity) -> None:
    """Shake hands with b over a lane as ``me``."""
    channel = await carrier("x").dial_key(key_of("b").public_key().public_bytes_raw())
    expected = Expected("b", "1", key_of("b").public_key().public_bytes_raw())
    session = Session(me.as_peer(), me.key, True, expected, os.urandom(NONCE_BYTES))
    try:
        await introduce(channel, session, lambda peer: None)
    finally:
        channel.close()


async def test_a_stranger_gets_no_lane_and_neither_does_a_peers_name_with_another_key(ends: Ends) -> None:
    _, at_b = await ends.connect()
    with pytest.raises(PeerRefused, match="no connection that this lane could belong to"):
        await greets(local("c"))
    forged = LocalIdentity("a", "1", key_of("c"), local("a").fingerprint, local("a").role)
    with pytest.raises(PeerRefused, match="public_key"):
        await greets(forged)
    with pytest.raises(PeerRefused, match="incarnation"):
        await greets(local("a", incarnation="2"))
    assert at_b.lane_count == 0


async def test_a_lane_to_what_a_node_was_before_it_was_restarted_is_refused_and_the_peer_stays(ends: Ends) -> None:
    """The old process hangs on to the name, so the new one has no lanes of its own."""
    anew = KvEndpoint(local("b", "2"), Recorder(), limits=QUICK)
    try:
        assert anew.open_lanes([carrier("b")]) == ("tcp",)
        port = await anew.listen("127.0.0.1", 0)
        peer = await ends.a.peer(who("b", "2"), KvAddress("127.0.0.1", port), soon())
        with pytest.raises(LaneFailed):
            await ends.a.lanes(peer, SHM)
        assert peer.alive
    finally:
        await anew.close()


async def test_a_peer_has_no_more_lanes_than_are_allowed(ends: Ends) -> None:
    _, at_b = await ends.connect()
    await asyncio.gather(*(greets(local("a")) for _ in range(QUICK.max_lanes * 2)), return_exceptions=True)
    assert at_b.lane_count <= QUICK.max_lanes


# ---- two processes


def _child(pipe: Pipe) -> None:
    async def run() -> None:
        recorder = Recorder()
        endpoint = KvEndpoint(local("b"), recorder, limits=QUICK)
        endpoint.open_lanes([carrier("b")])
        pipe.send(await endpoint.listen("127.0.0.1", 0))
        peer = await endpoint.peer(who("a"), None, soon(20))
        await until(lambda: peer.lanes(SHM), 20)
        while True:  # send as much as the other side takes
            await send_data(peer, data(0, 1 << 20), [bytes(1 << 20)])

    asyncio.run(run())


async def test_a_process_that_is_killed_leaves_nothing_behind_and_is_noticed_at_once() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_child, args=(theirs,), daemon=True)
    process.start()
    recorder = Recorder()
    endpoint = KvEndpoint(local("a"), recorder, limits=QUICK)
    try:
        endpoint.open_lanes([carrier("a")])
        port = await asyncio.to_thread(ours.recv)
        peer = await endpoint.peer(who("b"), KvAddress("127.0.0.1", port), soon(20))
        (lane,) = await endpoint.lanes(peer, SHM)
        items = [peer.submit(data(seq, 1 << 20), [bytes(1 << 20)], only=(lane,)) for seq in range(200)]
        await until(lambda: items[3].carrier is not None)
        os.kill(process.pid or 0, signal.SIGKILL)
        loop = asyncio.get_running_loop()
        killed = loop.time()
        await until(lambda: not lane.alive)
        assert loop.time() - killed < 0.5
        await until(lambda: not peer.alive)
        assert all(item.carrier is None or not item.carrier.alive for item in items[50:])
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()
        await endpoint.close()
    await asyncio.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
