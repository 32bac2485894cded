"""What the kernel and the stream tell about one connection."""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass

from kvcache.control import LinkReport

_INFO_BYTES = 168
_APP_LIMITED = 1
_BUSY_GAP_S = 0.05
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """From Linux's TCP_INFO. ``delivery_bytes_per_s`` is 0 where the sender, not the path, was the limit."""

    rtt_s: float
    retransmits: int
    delivery_bytes_per_s: float


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """The kernel's view of ``sock``; None off Linux, on kernels too old to tell, or on a closed socket."""
    if sys.platform != "linux":
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # closed
        return None
    if len(raw) < _INFO_BYTES:
        return None
    (rtt_us,) = struct.unpack_from("=I", raw, 68)
    (retransmits,) = struct.unpack_from("=I", raw, 100)
    (delivery,) = struct.unpack_from("=Q", raw, 160)
    return TcpInfo(rtt_us / 1e6, retransmits, 0.0 if raw[7] & _APP_LIMITED else float(delivery))


def tune(sock: socket.socket, socket_buffer: int, unsent_in_kernel: int) -> None:
    """Options of a KV socket. Raises OSError where the socket is already gone.

    Buffers are fixed only where that gives more than the kernel's own tuning would reach: fixing them ends the tuning.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, option, limit in (("wmem", socket.SO_SNDBUF, "wmem_max"), ("rmem", socket.SO_RCVBUF, "rmem_max")):
        if min(socket_buffer, _sysctl(f"core/{limit}")) * 2 > _sysctl(f"ipv4/tcp_{name}"):
            sock.setsockopt(socket.SOL_SOCKET, option, socket_buffer)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_in_kernel)


def _sysctl(name: str) -> int:
    """The last number of a network setting; 0 where the platform has none."""
    try:
        with open(f"/proc/sys/net/{name}") as file:
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


class RateMeter:
    """Bytes per second while bytes are coming; pauses longer than 50 ms do not count."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """Smoothed; 0 before the first MiB."""
        self._last = 0.0
        self._bytes = 0
        self._busy_s = 0.0

    def add(self, nbytes: int, now: float) -> None:
        """``nbytes`` have just come."""
        gap = now - self._last
        self._last = now
        if gap > _BUSY_GAP_S:
            return
        self._bytes += nbytes
        self._busy_s += gap
        if self._bytes >= _SAMPLE_BYTES and self._busy_s > 0:
            rate = self._bytes / self._busy_s
            self.bytes_per_s = rate if not self.bytes_per_s else 0.8 * self.bytes_per_s + 0.2 * rate
            self._bytes, self._busy_s = 0, 0.0


class LinkFigures:
    """Counts of one connection, and what the kernel says of its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = 0
        self._sent = 0
        self._meter = RateMeter()
        self._delivery = 0.0

    def received(self, nbytes: int, now: float) -> None:
        """Bytes have come."""
        self._received += nbytes
        self._meter.add(nbytes, now)

    def sent(self, nbytes: int) -> None:
        """Bytes have gone to the kernel."""
        self._sent += nbytes

    def sample(self) -> None:
        """Keep the last delivery rate that was the path's, not the sender's."""
        info = tcp_info(self._sock)
        if info is not None and info.delivery_bytes_per_s:
            self._delivery = info.delivery_bytes_per_s

    def rtt_s(self, measured: float) -> float:
        """The kernel's round trip, or the one ``measured`` above it."""
        info = tcp_info(self._sock)
        return info.rtt_s if info is not None else measured

    def report(self, peer_node: str, measured_rtt_s: float) -> LinkReport:
        """Since the connection began; the rate is that of the direction which carried more."""
        info = tcp_info(self._sock)
        return LinkReport(
            peer_node,
            measured_rtt_s if info is None else info.rtt_s,
            self._meter.bytes_per_s if self._received > self._sent else self._delivery,
            self._received,
            self._sent,
            0 if info is None else info.retransmits,
        )
