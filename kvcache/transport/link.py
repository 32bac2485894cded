"""What the kernel and the stream tell about a link."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.control import LinkReport
from kvcache.transport.delivery import Counts, DeliveryWatch

_INFO_BYTES = 168
_INFO_WITH_RESENT_BYTES = 216
_APP_LIMITED = 1
_BUSY_GAP_S = 0.05
_SAMPLE_BYTES = 1 << 20
_NO_RTT_US = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """From Linux's TCP_INFO. ``delivery_bytes_per_s`` is 0 where the sender, not the path, was the limit.

    ``rtt_s`` is smoothed and holds delayed acknowledgements too; ``shortest_rtt_s`` is the path's own, 0 while unknown.
    ``delivered_bytes`` (acknowledged, selectively too) and ``resent_bytes`` count since the connection began;
    ``outstanding_bytes`` were given to the kernel and are not delivered, and for ``busy_s`` there were some.
    """

    rtt_s: float
    shortest_rtt_s: float
    retransmits: int
    delivery_bytes_per_s: float
    delivered_bytes: int
    outstanding_bytes: int
    segment_bytes: int
    window_bytes: int
    busy_s: float
    resent_bytes: int


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """The kernel's view of ``sock``; None off Linux, on kernels too old to tell, or on a closed socket."""
    if sys.platform != "linux":
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_WITH_RESENT_BYTES)
    except OSError:  # closed
        return None
    if len(raw) < _INFO_BYTES:
        return None
    mss, unacked, sacked = struct.unpack_from("=I4xII", raw, 16)
    (rtt_us,) = struct.unpack_from("=I", raw, 68)
    (window,) = struct.unpack_from("=I", raw, 80)
    (retransmits,) = struct.unpack_from("=I", raw, 100)
    (acked,) = struct.unpack_from("=Q", raw, 120)
    unsent, shortest_us = struct.unpack_from("=II", raw, 144)
    (delivery,) = struct.unpack_from("=Q", raw, 160)
    whole = len(raw) >= _INFO_WITH_RESENT_BYTES
    busy_us, resent = struct.unpack_from("=Q32xQ", raw, 168) if whole else (0, 0)
    shortest_s = 0.0 if shortest_us == _NO_RTT_US else shortest_us / 1e6
    path_rate = 0.0 if raw[7] & _APP_LIMITED else float(delivery)
    outstanding = unsent + max(0, unacked - sacked) * mss
    delivered = acked + sacked * mss
    return TcpInfo(
        rtt_s=rtt_us / 1e6,
        shortest_rtt_s=shortest_s,
        retransmits=retransmits,
        delivery_bytes_per_s=path_rate,
        delivered_bytes=delivered,
        outstanding_bytes=outstanding,
        segment_bytes=mss,
        window_bytes=window * mss,
        busy_s=busy_us / 1e6,
        resent_bytes=resent,
    )


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
    """Counts of one connection, and what the kernel said last of its socket."""

    def __init__(self, sock: socket.socket | None) -> None:
        self.received_bytes = 0
        self.sent_bytes = 0
        self.ping_rtt_s = 0.0
        """The last ping's round trip; 0 before the first."""
        self.delivery_bytes_per_s = 0.0
        """The last delivery rate that was the path's limit and not the sender's; 0 before the first."""
        self._sock = sock
        self._busy_told_s = 0.0
        self._info: TcpInfo | None = None
        self.sample()

    @property
    def rtt_s(self) -> float:
        """Round trip: the kernel's estimate, or the ping's."""
        return self._info.rtt_s if self._info is not None else self.ping_rtt_s

    @property
    def shortest_rtt_s(self) -> float:
        """The shortest round trip that the kernel saw lately, or the last ping's; 0 before the first."""
        return self._info.shortest_rtt_s if self._info is not None else self.ping_rtt_s

    @property
    def retransmits(self) -> int:
        """Segments sent again since the connection began."""
        return self._info.retransmits if self._info is not None else 0

    @property
    def delivered_bytes(self) -> int:
        """Bytes that have reached the other end's kernel; 0 where this one does not tell."""
        return self._info.delivered_bytes if self._info is not None else 0

    @property
    def outstanding_bytes(self) -> int:
        """Bytes that this kernel has and the other end's has not."""
        return self._info.outstanding_bytes if self._info is not None else 0

    @property
    def segment_bytes(self) -> int:
        """The most that one segment carries."""
        return self._info.segment_bytes if self._info is not None else 0

    @property
    def window_bytes(self) -> int:
        """What may be on its way at once: the congestion window."""
        return self._info.window_bytes if self._info is not None else 0

    @property
    def busy_s(self) -> float:
        """Seconds in which there were such bytes."""
        return self._info.busy_s if self._info is not None else 0.0

    @property
    def resent_bytes(self) -> int:
        """Bytes sent again since the connection began."""
        return self._info.resent_bytes if self._info is not None else 0

    @property
    def app_limited(self) -> bool:
        """Whether there was too little to send, at the last sample, to tell what the path can do."""
        return self._info is None or not self._info.delivery_bytes_per_s

    def newly_busy_s(self) -> float:
        """As ``busy_s``, since this was last asked."""
        newly, self._busy_told_s = self.busy_s - self._busy_told_s, self.busy_s
        return newly

    def sample(self) -> None:
        """Ask the kernel. A closed socket leaves what it said last; where there is none, nothing is ever said."""
        if self._sock is not None:
            self._info = tcp_info(self._sock) or self._info
        if self._info is not None and self._info.delivery_bytes_per_s:
            self.delivery_bytes_per_s = self._info.delivery_bytes_per_s


class PeerFigures:
    """Figures of one peer over all its connections, present and past."""

    def __init__(self, peer_node: str, now: float) -> None:
        self.meter = RateMeter()
        self.delivery = DeliveryWatch(now)
        self.probe_bytes = 0
        """What was sent to measure idle connections."""
        self._peer_node = peer_node
        self._received = 0
        self._sent = 0
        self._delivered = 0
        self._busy_s = 0.0
        self._resent = 0
        self._retransmits = 0
        self._lost = 0

    def retire(self, figures: LinkFigures) -> None:
        """That connection is over: keep its counts."""
        self._received += figures.received_bytes
        self._sent += figures.sent_bytes
        self._delivered += figures.delivered_bytes
        self._resent += figures.resent_bytes
        self._retransmits += figures.retransmits
        self._lost += 1

    def sent_bytes(self, present: Sequence[LinkFigures]) -> int:
        """All that was given to the kernel."""
        return self._sent + sum(figures.sent_bytes for figures in present)

    def counts(self, present: Sequence[LinkFigures], waited_s: float, pace: float) -> Counts:
        """All connections together, as of the last samples: busy for as long as the one that was busiest since."""
        self._busy_s += max((figures.newly_busy_s() for figures in present), default=0.0)
        return Counts(
            delivered=self._delivered + sum(figures.delivered_bytes for figures in present),
            outstanding=sum(figures.outstanding_bytes for figures in present),
            busy_s=self._busy_s,
            waited_s=waited_s,
            rtt_s=min((figures.rtt_s for figures in present if figures.rtt_s), default=0.0),
            least_rtt_s=least_rtt_s(present),
            pace=pace,
        )

    def report(self, present: Sequence[LinkFigures], pace: float, now: float) -> LinkReport:
        """Counts since the peer began; the goodput is that of the direction which carried more."""
        for figures in present:
            figures.sample()
        lately = self.delivery.told(now)
        received = self._received + sum(f.received_bytes for f in present)
        sent = self.sent_bytes(present)
        delivery = sum(f.delivery_bytes_per_s for f in present)
        return LinkReport(
            peer_node=self._peer_node,
            rtt_s=min((f.rtt_s for f in present if f.rtt_s), default=0.0),
            goodput_bytes_per_s=self.meter.bytes_per_s if received > sent else delivery,
            bytes_received=received,
            bytes_sent=sent,
            retransmits=self._retransmits + sum(f.retransmits for f in present),
            connections=len(present),
            connections_lost=self._lost,
            delivery_bytes_per_s=delivery,
            app_limited=all(f.app_limited for f in present),
            paced_bytes_per_s=pace,
            least_rtt_s=least_rtt_s(present),
            bytes_acked=self._delivered + sum(f.delivered_bytes for f in present),
            bytes_resent=self._resent + sum(f.resent_bytes for f in present),
            probe_bytes=self.probe_bytes,
            at_least_bytes_per_s=lately.at_least,
            at_most_bytes_per_s=lately.at_most,
            stalled_s=lately.stalled_s,
        )


def least_rtt_s(present: Sequence[LinkFigures]) -> float:
    """The path's own round trip; 0 while unmeasured."""
    return min((rtt for figures in present if (rtt := figures.shortest_rtt_s)), default=0.0)
