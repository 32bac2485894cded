"""The link as packets see it, between two real network stacks."""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.wan import conftest, namespaces
from tests.wan.direction import LinkSettings
from tests.wan.link import ADDRESSES, End, Wan

MakeWan = Callable[[LinkSettings], Wan]
PAYLOAD = bytes(8000)
PACKET_BYTES = len(PAYLOAD) + 28
SLOW = LinkSettings(rate_bps=100e6, delay_s=0.015)


@contextlib.contextmanager
def udp(wan: Wan) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket at the near end, connected to one at the far end."""

    def bound(end: End) -> socket.socket:
        with end.entered():
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sock.settimeout(1.0)
        sock.bind((end.address, 0))
        return sock

    with bound(wan.near) as near, bound(wan.far) as far:
        near.connect(far.getsockname())
        far.connect(near.getsockname())
        yield near, far


def flood(near: socket.socket, far: socket.socket, seconds: float, bits_per_s: float) -> tuple[int, list[float]]:
    """Send at an even rate; how many packets left, and when each came that did (the last a second before the end)."""
    sent = 0

    def send() -> None:
        nonlocal sent
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            while sent < (now - began) * bits_per_s / (PACKET_BYTES * 8):
                near.send(PAYLOAD)
                sent += 1
            time.sleep(0.001)

    sender = threading.Thread(target=send)
    sender.start()
    times = []
    with contextlib.suppress(TimeoutError):
        while True:
            far.recv(len(PAYLOAD))
            times.append(time.monotonic())
    sender.join()
    return sent, times


def rate(times: list[float]) -> float:
    """Bits per second of packets that came at these times."""
    return (len(times) - 1) * PACKET_BYTES * 8 / (times[-1] - times[0])


def test_the_rate_is_within_5_percent(wan_of: MakeWan) -> None:
    with udp(wan_of(SLOW)) as (near, far):
        _, times = flood(near, far, 1.5, 1.3 * SLOW.rate_bps)
    assert rate(times) == pytest.approx(SLOW.rate_bps, rel=0.05)


def test_the_delay_is_within_2_ms_each_way(wan_of: MakeWan) -> None:
    trips = []
    with udp(wan_of(SLOW)) as (near, far):
        for _ in range(21):
            began = time.monotonic()
            near.send(b"ping")
            far.send(far.recv(4))
            near.recv(4)
            trips.append(time.monotonic() - began)
    assert min(trips) / 2 == pytest.approx(SLOW.delay_s, abs=0.002)
    assert statistics.median(trips) / 2 == pytest.approx(SLOW.delay_s, abs=0.002)


def test_the_loss_is_within_statistical_bounds(wan_of: MakeWan) -> None:
    chance = 0.05
    wan = wan_of(replace(SLOW, loss=chance))
    with udp(wan) as (near, far):
        sent, times = flood(near, far, 1.0, 0.8 * SLOW.rate_bps)
    there, _ = wan.counters()
    assert sent > 1000
    assert len(times) == sent - there.lost
    assert abs(there.lost - sent * chance) < 4 * math.sqrt(sent * chance * (1 - chance))


def test_what_the_queue_does_not_hold_is_lost(wan_of: MakeWan) -> None:
    wan = wan_of(replace(SLOW, queue_bytes=20 * PACKET_BYTES))
    with udp(wan) as (near, far):
        sent, times = flood(near, far, 0.5, 3 * SLOW.rate_bps)
    there, _ = wan.counters()
    assert len(times) == sent - there.overflowed
    assert there.overflowed / sent == pytest.approx(2 / 3, abs=0.1)


def test_a_link_can_be_cut_and_mended_while_it_runs(wan_of: MakeWan) -> None:
    wan = wan_of(SLOW)
    with udp(wan) as (near, far):
        near.send(b"before")
        assert far.recv(16) == b"before"
        wan.change(replace(SLOW, loss=1.0))
        near.send(b"lost")
        with pytest.raises(TimeoutError):
            far.recv(16)
        wan.change(SLOW)
        near.send(b"after")
        assert far.recv(16) == b"after"


def test_a_rate_can_be_changed_while_it_runs(wan_of: MakeWan) -> None:
    wan = wan_of(SLOW)
    wan.change(replace(SLOW, rate_bps=SLOW.rate_bps / 2))
    with udp(wan) as (near, far):
        _, times = flood(near, far, 1.0, SLOW.rate_bps)
    assert rate(times) == pytest.approx(SLOW.rate_bps / 2, rel=0.05)


def test_each_end_has_its_own_network(wan_of: MakeWan) -> None:
    wan = wan_of(SLOW)
    for end, address in zip((wan.near, wan.far), ADDRESSES, strict=True):
        assert end.start(["ip", "address", "show", "to", address], stdout=-1).communicate()[0] != b""
    with pytest.raises(OSError, match="assign"), socket.socket() as outside:
        outside.bind((ADDRESSES[0], 0))


def test_a_machine_without_tun_devices_skips_and_says_so(wan_of: MakeWan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "TUN", "/dev/net/absent")
    with pytest.raises(pytest.skip.Exception, match="/dev/net/absent"):
        wan_of(SLOW)
    assert conftest.WanUnavailable is namespaces.WanUnavailable
