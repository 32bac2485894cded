"""A burst over an idle path: what it shows at least, what at most, and that everything else comes first."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from math import ceil

import pytest
import pytest_asyncio

from kvcache.control import KvAddress
from kvcache.transport import KvEndpoint, Peer
from kvcache.transport.probe import CHUNK_BYTES, MAX_PROBE_BYTES, Probe
from kvcache.transport.sendqueue import SendBatch, SendQueue
from tests.kvcache.kvnet import QUICK, Recorder, data, local, send_data, soon, until, who

Two = tuple[KvEndpoint, KvEndpoint, Peer, Recorder]
FOUR = replace(QUICK, connections=4)
RTT_S = 0.03
MBPS = 1e6 / 8
linux = pytest.mark.skipif(sys.platform != "linux", reason="the round trip is the kernel's, on Linux alone")


def answered(nbytes: int, rate: float, window: int) -> Probe:
    """A probe over a path of this rate whose congestion window begins with so many bytes and doubles each round."""
    probe = Probe(1, nbytes, window, RTT_S, 100.0)
    left, now = probe.chunks, 100.0 + RTT_S
    while left:
        burst = min(left, max(1, window // CHUNK_BYTES))
        for n in range(burst):
            probe.answer(now + (n + 1) * CHUNK_BYTES / rate)
        left, window = left - burst, 2 * window
        now += max(RTT_S, burst * CHUNK_BYTES / rate)
    return probe


@pytest.mark.parametrize("window", [58_000, 360_000])
def test_a_burst_the_size_of_a_slow_links_budget_tells_it_from_a_fast_one(window: int) -> None:
    budget = 190_000
    slow, fast = (answered(budget, rate * MBPS, window) for rate in (50, 1000))
    assert 30 * MBPS < slow.at_least() <= 50.1 * MBPS
    assert fast.at_least() > 80 * MBPS


@pytest.mark.parametrize("window", [58_000, 360_000])
def test_a_burst_the_size_of_a_fast_links_budget_finds_it_cut(window: int) -> None:
    cut = answered(2 << 20, 50 * MBPS, window)
    assert 50 * MBPS <= cut.at_most() < 120 * MBPS
    assert cut.at_least() <= 50.1 * MBPS


@pytest.mark.parametrize("nbytes", [64 << 10, 256 << 10, 2 << 20])
@pytest.mark.parametrize("window", [58_000, 360_000])
def test_a_window_that_grows_does_not_make_a_fast_path_look_slow(nbytes: int, window: int) -> None:
    probe = answered(nbytes, 1000 * MBPS, window)
    assert probe.at_most() == 0.0 or probe.at_most() > 500 * MBPS


def test_somebody_who_was_kept_from_answering_does_not_make_a_fast_path_look_slow() -> None:
    probe, now = Probe(1, 256 << 10, 10**6, RTT_S, 0.0), RTT_S
    for n in range(probe.chunks):
        now += 0.1 if n == 5 else 1e-4
        probe.answer(now)
    assert probe.at_most() == 0.0


def test_a_least_round_trip_of_another_route_does_not_make_a_fast_path_look_slow() -> None:
    probe = Probe(1, 98_304, 10**6, 0.004, 0.0)
    for n in range(probe.chunks):
        probe.answer(RTT_S + n * 1e-4)
    assert probe.at_most() == 0.0


def test_answers_read_at_once_show_no_endless_rate() -> None:
    probe = Probe(1, 160 << 10, 58_000, RTT_S, 0.0)
    for _ in range(probe.chunks):
        probe.answer(RTT_S)
    assert probe.at_least() == pytest.approx(160 * 1024 / 0.005)
    assert probe.at_most() == 0.0


def test_an_unfinished_probe_says_nothing_of_the_most_and_its_size_is_bounded() -> None:
    probe = Probe(1, 1 << 40, 0, RTT_S, 0.0)
    assert probe.nbytes == MAX_PROBE_BYTES
    assert probe.chunks == ceil(MAX_PROBE_BYTES / CHUNK_BYTES)
    probe.answer(99.0)
    assert (probe.at_least(), probe.at_most(), probe.answered) == (0.0, 0.0, False)


def test_everything_else_goes_before_a_probe() -> None:
    queue = SendQueue()
    queue.push_probe(b"p", 3)
    queue.push_data(b"t", b"head", [], 1)
    queue.push_control(b"c")
    order = [bytes(item.parts[0]) for item in iter(queue.take, None)]
    assert order == [b"c", b"head", b"p", b"p", b"p"]


def test_what_a_lost_connection_had_of_a_probe_is_not_sent_again() -> None:
    queue, batch = SendQueue(), SendBatch()
    queue.push_probe(b"p", 2)
    assert len(batch.gather(queue)) == 2
    queue.put_back(batch.clear())
    assert not queue


@pytest_asyncio.fixture
async def two() -> AsyncIterator[Two]:
    on_b = Recorder()
    a, b = KvEndpoint(local("a"), Recorder(), None, FOUR), KvEndpoint(local("b"), on_b, None, FOUR)
    peer = await a.peer(who("b"), KvAddress("127.0.0.1", await b.listen("127.0.0.1", 0)), soon())
    await until(lambda: len(peer.connections) == 4)
    yield a, b, peer, on_b
    await a.close()
    await b.close()


@linux
async def test_an_idle_path_is_measured_and_reported(two: Two) -> None:
    a, b, _, _ = two
    measured = asyncio.Event()
    await until(lambda: a.probe("b", 256 << 10, measured.set))
    await asyncio.wait_for(measured.wait(), 5)
    (sent,), (received,) = a.links(), b.links()
    assert sent.probe_bytes == 256 << 10
    assert sent.at_least_bytes_per_s > 1e6
    assert sent.bytes_acked > 256 << 10
    assert 0 < sent.least_rtt_s <= sent.rtt_s
    assert (received.probe_bytes, received.at_least_bytes_per_s) == (0, 0.0)
    assert not a.probe("nobody", 1, measured.set)


@linux
async def test_a_transfer_ends_a_probe_and_is_not_measured_by_it(two: Two) -> None:
    a, _, peer, on_b = two
    measured: list[bool] = []
    await until(lambda: a.probe("b", MAX_PROBE_BYTES, lambda: measured.append(True)))
    assert not a.probe("b", 1, lambda: measured.append(False)), "one at a time"
    await send_data(peer, data(0, 1000), [bytes(1000)])
    await until(lambda: on_b.arrived)
    await asyncio.sleep(0.2)
    assert not measured
    assert not peer.queue
    await until(lambda: a.probe("b", 1, lambda: measured.append(True)))
    await until(lambda: measured)


@linux
async def test_a_path_that_carries_something_is_not_probed(two: Two) -> None:
    a, _, peer, on_b = two
    await send_data(peer, data(0, 1 << 20), [bytes(1 << 20)])
    await until(lambda: on_b.arrived and peer.busy)
    assert not a.probe("b", 1, lambda: None)
