"""Several connections for each pair of nodes: frames spread over them, and survive the loss of any."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from kvcache.control import KvAddress
from kvcache.transport import KvEndpoint, Peer, PeerLost, PeerRefused, TransportLimits
from kvcache.wire import Grant
from tests.kvcache.kvnet import QUICK, Net, Proxy, Recorder, T, data, local, send_data, soon, until, who

MIB = 1 << 20
FOUR = replace(QUICK, connections=4)


@pytest_asyncio.fixture
async def net() -> AsyncIterator[Net]:
    endpoints: list[KvEndpoint] = []

    async def make(name: str, limits: TransportLimits = FOUR) -> tuple[KvEndpoint, Recorder]:
        recorder = Recorder()
        endpoints.append(KvEndpoint(local(name), recorder, None, limits))
        return endpoints[-1], recorder

    yield make
    for endpoint in endpoints:
        await endpoint.close()


async def pair(net: Net, limits: TransportLimits = FOUR) -> tuple[Peer, Recorder, Peer, Recorder]:
    (a, on_a), (b, on_b) = await net("a", limits=limits), await net("b", limits=limits)
    port = await b.listen("127.0.0.1", 0)
    at_a = await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
    at_b = await b.peer(who("a"), None, soon())
    await until(lambda: len(at_a.connections) == len(at_b.connections) == limits.connections)
    return at_a, on_a, at_b, on_b


async def test_the_dialling_side_sets_up_all_connections_and_keeps_them(net: Net) -> None:
    at_a, _, at_b, _ = await pair(net)
    for _ in range(3):
        cut = [at_a.connections[1], at_b.connections[2]]
        for connection in cut:
            connection.end("cut")
        await until(lambda: len(at_a.connections) == len(at_b.connections) == 4)
        assert not {*cut} & {*at_a.connections, *at_b.connections}
    assert at_a.alive
    assert at_b.alive


async def test_frames_stripe_over_all_connections(net: Net) -> None:
    at_a, _, _, on_b = await pair(net)
    payloads = [random.Random(seq).randbytes(MIB) for seq in range(32)]
    carriers = await asyncio.gather(*(send_data(at_a, data(seq, MIB), [p]) for seq, p in enumerate(payloads)))
    await until(lambda: len(on_b.arrived) == 32)
    assert {on_b.memory[T, seq] == payload for seq, payload in enumerate(payloads)} == {True}
    assert set(carriers) == set(at_a.connections)
    assert min(c.figures.sent_bytes for c in at_a.connections) > MIB


async def test_small_frames_spread_too_so_that_each_connection_carries_its_part_of_a_burst(net: Net) -> None:
    at_a, _, _, on_b = await pair(net)
    before = [c.figures.sent_bytes for c in at_a.connections]
    block = bytes(128 << 10)
    items = [at_a.submit(data(seq, len(block)), [block], 1) for seq in range(8)]
    for item in items:
        await at_a.carried(item)
    await until(lambda: len(on_b.arrived) == 8)
    gone = [c.figures.sent_bytes - b for c, b in zip(at_a.connections, before, strict=True)]
    assert max(gone) <= 4 * len(block) + 10_000


@pytest.mark.parametrize("killer", ["sender", "receiver"])
async def test_unsent_frames_of_a_lost_connection_leave_over_the_others(net: Net, killer: str) -> None:
    """What was sent may be lost and is named; what was not sent is not lost."""
    at_a, on_a, at_b, on_b = await pair(net)
    at_b.pause()
    payloads = [random.Random(seq).randbytes(MIB) for seq in range(64)]
    sends = [asyncio.create_task(send_data(at_a, data(seq, MIB), [p])) for seq, p in enumerate(payloads)]
    await asyncio.sleep(0.1)
    cut = (at_a if killer == "sender" else at_b).connections[0]
    cut.end("cut")
    await until(lambda: on_a.broken and on_b.broken)
    at_b.resume()
    carriers = await asyncio.gather(*sends)
    lost = {seq for seq, carrier in enumerate(carriers) if carrier is on_a.broken[0][0]}
    await until(lambda: {seq for _, seq in on_b.arrived} >= set(range(64)) - lost)
    assert len(lost) < 16
    assert all(on_b.memory[T, seq] == payloads[seq] for _, seq in on_b.arrived)
    assert not on_a.lost
    assert not on_b.lost


async def test_the_payload_that_was_under_way_is_named_and_no_longer_written(net: Net) -> None:
    at_a, _, at_b, on_b = await pair(net)
    rooms: list[bytearray] = []

    def target(peer: Peer, frame: object) -> list[memoryview]:
        if not rooms:
            at_b.pause()
        rooms.append(bytearray(8 * MIB))
        return [memoryview(rooms[-1])]

    on_b.target = target
    sending = asyncio.create_task(send_data(at_a, data(7, 8 * MIB), [b"x" * 8 * MIB]))
    await until(lambda: rooms)
    receiving = next(c for c in at_b.connections if c.receiving is not None)
    receiving.end("cut")
    await until(lambda: on_b.broken)
    assert on_b.broken == [(receiving, data(7, 8 * MIB))]
    before = bytes(rooms[0])
    at_b.resume()
    await asyncio.wait_for(sending, 5)
    await asyncio.sleep(0.1)
    assert rooms[0] == before


async def test_a_peer_without_connections_is_reached_again_and_nothing_queued_is_lost(net: Net) -> None:
    at_a, on_a, at_b, on_b = await pair(net)
    for connection in at_a.connections:
        connection.end("cut")
    assert at_a.alive
    at_a.send(Grant(T))
    sending = asyncio.create_task(send_data(at_a, data(0, MIB), [b"x" * MIB]))
    await until(lambda: on_b.frames and on_b.arrived)
    await sending
    await until(lambda: len(at_a.connections) == len(at_b.connections) == 4)
    assert len(on_a.broken) == 4
    assert len(on_b.broken) == 4
    assert not on_a.lost


async def test_the_accepting_side_too_waits_for_a_peer_to_come_back(net: Net) -> None:
    _, on_a, at_b, on_b = await pair(net)
    for connection in at_b.connections:
        connection.end("cut")
    at_b.send(Grant(T))
    await until(lambda: on_a.frames)
    assert not on_b.lost


async def test_a_peer_that_does_not_come_back_is_lost_once_after_the_grace(net: Net) -> None:
    (a, on_a), (b, on_b) = await net("a"), await net("b")
    proxy = Proxy(await b.listen("127.0.0.1", 0))
    at_a = await a.peer(who("b"), await proxy.start(), soon())
    await until(lambda: len(at_a.connections) == 4)
    waiting = asyncio.create_task(send_data(at_a, data(0, 64 * MIB), [bytes(64 * MIB)]))
    await proxy.stop()
    took = await until(lambda: on_a.lost and on_b.lost)
    assert 0.3 < took < 3
    assert len(on_a.lost) == len(on_b.lost) == 1
    with pytest.raises(PeerLost):
        await waiting
    await until(lambda: not a._keeper and not b._keeper)


async def test_another_incarnation_at_the_address_ends_the_wait_at_once(net: Net) -> None:
    limits = replace(FOUR, resume_s=30.0)
    a, on_a = await net("a", limits=limits)
    old = KvEndpoint(local("b", "1"), Recorder(), None, limits)
    port = await old.listen("127.0.0.1", 0)
    at_a = await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
    await until(lambda: len(at_a.connections) == 4)
    for task in list(old._tasks):
        task.cancel()
    await asyncio.sleep(0)
    for listener in old._listeners:
        listener.close()
    for peer in old._peers.values():
        for connection in peer.connections:
            connection.end("killed")
    new = KvEndpoint(local("b", "2"), Recorder(), None, limits)
    try:
        await new.listen("127.0.0.1", port)
        await until(lambda: on_a.lost)
        assert "incarnation" in on_a.lost[0][1]
    finally:
        await old.close()
        await new.close()


async def test_a_deliberate_end_needs_no_grace(net: Net) -> None:
    at_a, on_a, _, on_b = await pair(net, replace(FOUR, resume_s=30.0))
    at_a.close("this node drains")
    await until(lambda: on_a.lost and on_b.lost)
    assert on_b.lost == [("a", "closed by the peer: closing: this node drains")]
    await asyncio.sleep(0.1)
    assert len(on_b.lost) == 1


async def test_one_connection_that_is_cut_silently_is_replaced_and_the_peer_stays(net: Net) -> None:
    (a, on_a), (b, on_b) = await net("a"), await net("b")
    port = await b.listen("127.0.0.1", 0)
    proxy = Proxy(port)
    at_a = await a.peer(who("b"), await proxy.start(), soon())
    await until(lambda: len(at_a.connections) == 4)
    proxy.silent = True
    straight = KvAddress("127.0.0.1", port)
    await a._connect(who("b"), straight, at_a)
    await until(lambda: len(at_a.connections) == 1)
    for seq in range(8):
        at_a.submit(data(seq, 1000), [bytes(1000)], 1)
    await until(lambda: len(on_b.arrived) == 8)
    assert not on_a.lost
    assert not on_b.lost
    await proxy.stop()


async def test_a_paused_peer_stays_paused_over_new_connections(net: Net) -> None:
    at_a, _, at_b, on_b = await pair(net)
    at_b.pause()
    at_a.connections[0].end("cut")
    await until(lambda: len(at_a.connections) == len(at_b.connections) == 4)
    for n in range(8):
        at_a.submit(data(n, 10), [bytes(10)], 1)
    await asyncio.sleep(0.1)
    assert not on_b.arrived
    at_b.resume()
    await until(lambda: len(on_b.arrived) == 8)


async def test_connections_of_one_peer_are_bounded(net: Net) -> None:
    (a, _), (b, _) = await net("a"), await net("b", limits=replace(FOUR, max_connections=4))
    address = KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0))
    at_a = await a.peer(who("b"), address, soon())
    await until(lambda: len(at_a.connections) == 4)
    with pytest.raises(PeerRefused, match="connections"):
        await a._connect(who("b"), address, at_a)


async def test_losing_and_regaining_connections_leaks_nothing(net: Net) -> None:
    at_a, on_a, at_b, on_b = await pair(net)
    fds, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    for round_ in range(10):
        at_a.submit(data(round_, 100_000), [bytes(100_000)], 1)
        for connection in at_a.connections[: 1 + round_ % 4]:
            connection.end("cut")
        await until(lambda: len(at_a.connections) == len(at_b.connections) == 4)
    await asyncio.sleep(0.2)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert len(asyncio.all_tasks()) == tasks
    assert not on_a.lost
    assert not on_b.lost


async def test_a_stopped_receiver_leaves_another_its_speed(net: Net) -> None:
    """The margin is for busy machines."""
    a, _ = await net("a", limits=replace(FOUR, lost_after_s=30.0))
    (b, _), (c, on_c) = await net("b"), await net("c")
    to_b = await a.peer(who("b"), KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0)), soon())
    to_c = await a.peer(who("c"), KvAddress("127.0.0.1", await c.listen("127.0.0.1", 0)), soon())
    await until(lambda: len(to_b.connections) == len(to_c.connections) == 4)
    block = bytes(MIB)

    async def speed() -> float:
        on_c.arrived.clear()
        began = asyncio.get_running_loop().time()
        for seq in range(100):
            await send_data(to_c, data(seq, MIB), [block])
        await until(lambda: len(on_c.arrived) == 100, 30)
        return 1 / (asyncio.get_running_loop().time() - began)

    lone = max([await speed() for _ in range(3)])
    (await b.peer(who("a"), None, soon())).pause()
    stuck = [asyncio.create_task(send_data(to_b, data(seq, 8 * MIB), [bytes(8 * MIB)])) for seq in range(20)]
    await asyncio.sleep(0.1)
    beside = max([await speed() for _ in range(3)])
    assert not any(task.done() for task in stuck[10:])
    assert beside > 0.7 * lone
    await a.close()
    await asyncio.gather(*stuck, return_exceptions=True)


async def test_what_may_go_over_some_connections_only_goes_over_no_other_and_behind_what_went_there(net: Net) -> None:
    at_a, _, at_b, on_b = await pair(net)
    some = at_a.connections[1:3]
    order: list[object] = []
    frame, target = at_b.on_frame, at_b.payload_target
    at_b.on_frame = lambda c, f: (order.append(c), frame(c, f))[1]
    at_b.payload_target = lambda c, d: (order.append((c, d.seq)), target(c, d))[1]
    at_a.send_over(Grant(T), some)
    items = [at_a.submit(data(seq, MIB), [bytes(MIB)], 0, some) for seq in range(12)]
    carriers = [await at_a.carried(item) for item in items]
    await until(lambda: len(on_b.arrived) == 12)
    assert set(carriers) == set(some)
    first = {entry[0]: n for n, entry in reversed(list(enumerate(order))) if isinstance(entry, tuple)}
    assert len(first) == 2
    assert all(order.index(connection) < n for connection, n in first.items())


async def test_what_may_go_over_some_connections_only_is_given_up_with_the_last_of_them(net: Net) -> None:
    at_a, _, at_b, on_b = await pair(net)
    at_b.pause()
    some = at_a.connections[:2]
    items = [at_a.submit(data(seq, 8 * MIB), [bytes(8 * MIB)], 0, some) for seq in range(8)]
    some[0].end("cut")
    await asyncio.sleep(0.05)
    assert items[-1].carrier is None
    some[1].end("cut")
    carriers = [await asyncio.wait_for(at_a.carried(item), 5) for item in items]
    assert carriers[-1] in some
    late = at_a.submit(data(8, MIB), [bytes(MIB)], 0, some)
    assert late.carrier in some
    at_b.resume()
    await send_data(at_a, data(9, MIB), [bytes(MIB)])
    await until(lambda: (T, 9) in on_b.arrived)
    assert not {(T, 7), (T, 8)} & {*on_b.arrived}


async def test_what_may_go_anywhere_again_does(net: Net) -> None:
    at_a, _, _, on_b = await pair(net)
    some = at_a.connections[:1]
    items = [at_a.submit(data(seq, 8 * MIB), [bytes(8 * MIB)], 0, some) for seq in range(8)]
    at_a.unpin(T)
    carriers = [await at_a.carried(item) for item in items]
    await until(lambda: len(on_b.arrived) == 8)
    assert len(set(carriers)) > 1
