"""Rates are the kernel's business: it is told what a node may send, and what its buffers must hold."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from kvcache.control import KvAddress
from kvcache.transport import KvEndpoint, Peer
from kvcache.transport.shaping import Shape, forget_path, spread
from tests.kvcache.kvnet import QUICK, Recorder, data, local, send_data, soon, until, who

MIB = 1 << 20
FOUR = replace(QUICK, connections=4)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel paces on Linux alone")


def test_a_rate_is_spread_over_the_connections_that_are_busy() -> None:
    assert spread(100.0, busy=8, mine=4, is_busy=True) == 12.5
    assert spread(100.0, busy=4, mine=4, is_busy=False) == 12.5
    assert spread(100.0, busy=0, mine=4, is_busy=False) == 25.0
    assert spread(0.0, busy=3, mine=1, is_busy=True) == 0.0


def test_buffers_grow_with_what_is_under_way_up_to_the_kernels_limit() -> None:
    with socket.socket() as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        shape = Shape(sock, 64 << 10, MIB)
        shape.fit_buffers(0.001, 1e6)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
        shape.fit_buffers(1.0, 1e12)
        with open("/proc/sys/net/core/wmem_max") as file:
            limit = int(file.read())
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) in (before, 2 * limit)


def test_the_slower_a_connection_the_less_waits_in_the_kernel_where_no_other_can_take_it_over() -> None:
    with socket.socket() as sock:
        shape = Shape(sock, 64 << 10, MIB)
        for rate, rtt_s, unsent in [(1e6, 0.03, 128 << 10), (5e6, 0.03, 300_000), (5e6, 0.001, 150_000), (1e9, 0, MIB)]:
            shape.fit_buffers(rtt_s, rate)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == unsent
        shape.fit_buffers(0.03, 0.0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == MIB


def test_a_pace_is_set_lifted_and_not_set_again_for_nothing() -> None:
    class Counting(socket.socket):
        calls = 0

        def setsockopt(self, *args: object) -> None:
            self.calls += 1
            super().setsockopt(*args)  # type: ignore[arg-type]

    with Counting() as sock:
        shape = Shape(sock, 1, MIB)
        shape.set_pace(0.0)
        assert sock.calls == 0
        for pace in (1e6, 1.01e6, 0.0, 0.0, 1e12):
            shape.set_pace(pace)
        assert sock.calls == 3
        assert shape.pace == 1e12


def test_a_congestion_control_that_remembers_a_path_begins_anew_and_others_are_left_alone() -> None:
    with socket.socket() as sock:
        for name, remembers in ((b"reno", False), (b"bbr", True)):
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            except OSError:
                pytest.skip(f"this kernel has no {name.decode()}")
            assert forget_path(sock) is remembers
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == name
    assert not forget_path(sock), "it is closed"


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[tuple[KvEndpoint, Peer, Recorder]]:
    a, on_b = KvEndpoint(local("a"), Recorder(), None, FOUR), Recorder()
    b = KvEndpoint(local("b"), on_b, None, FOUR)
    port = await b.listen("127.0.0.1", 0)
    peer = await a.peer(who("b"), KvAddress("127.0.0.1", port), soon())
    await until(lambda: len(peer.connections) == 4)
    yield a, peer, on_b
    await a.close()
    await b.close()


async def took(peer: Peer, on_b: Recorder, megabytes: int) -> float:
    on_b.arrived.clear()
    began = time.monotonic()
    for seq in range(megabytes * 8):
        await send_data(peer, data(seq, MIB // 8), [bytes(MIB // 8)])
    await until(lambda: len(on_b.arrived) == megabytes * 8, 20)
    return time.monotonic() - began


async def test_a_lease_is_kept_by_all_connections_together(ends: tuple[KvEndpoint, Peer, Recorder]) -> None:
    a, peer, on_b = ends
    rate = 24 * MIB
    a.pace(rate)
    seconds = await took(peer, on_b, 24)
    assert 0.7 < seconds < 1.6
    assert a.links()[0].paced_bytes_per_s == pytest.approx(rate, rel=0.05)
    a.pace(0.0)
    assert await took(peer, on_b, 24) < 0.6
    assert a.links()[0].paced_bytes_per_s == 0.0


async def test_a_lost_connections_share_goes_to_the_others(ends: tuple[KvEndpoint, Peer, Recorder]) -> None:
    a, peer, _ = ends
    a.pace(40e6)
    peer.connections[0].end("cut")
    await until(lambda: len(peer.connections) == 4)
    await asyncio.sleep(0.1)
    assert [round(c.pace / 1e6) for c in peer.connections] == [10] * 4


async def test_busy_peers_share_what_idle_ones_leave(ends: tuple[KvEndpoint, Peer, Recorder]) -> None:
    a, to_b, on_b = ends
    c = KvEndpoint(local("c"), Recorder(), None, FOUR)
    try:
        to_c = await a.peer(who("c"), KvAddress("127.0.0.1", await c.listen("127.0.0.1", 0)), soon())
        await until(lambda: len(to_c.connections) == 4)
        a.pace(16 * MIB)
        sending = asyncio.create_task(took(to_b, on_b, 8))
        await until(lambda: to_b.busy and not to_c.busy)
        assert {round(c.pace / MIB) for c in to_b.connections} == {4}
        await sending
    finally:
        await c.close()
