"""What the kernel is told about a KV socket: options, buffers from the bandwidth-delay product, a pace."""

from __future__ import annotations

import logging
import socket
import struct
import sys
from functools import cache

logger = logging.getLogger(__name__)

_SO_MAX_PACING_RATE = 47
_MODELLING = b"bbr"
_FORGETTING = b"reno"
_UNLIMITED = (1 << 64) - 1
_FRESH = 0.02
_LEAST_UNSENT = 128 << 10
_UNSENT_S, _UNSENT_RTTS = 0.03, 2
"""What may wait unsent in the kernel, in time: what waits there can no longer go over another connection."""


def tune(sock: socket.socket, socket_buffer: int, unsent_in_kernel: int) -> None:
    """Options of a new KV socket. Raises OSError where the socket is already gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        _fix_buffer(sock, option, socket_buffer)
    _limit_unsent(sock, unsent_in_kernel)


def forget_path(sock: socket.socket) -> bool:
    """Let the kernel learn an idle connection's path anew, where its congestion control (BBR) remembers a rate.

    After a slow time it would go on at that rate, and grow by a quarter in eight round trips that are full. True where
    it did; such a connection keeps its window over a pause.
    """
    if sys.platform != "linux":
        return False
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        if name != _MODELLING:
            return False
        for each in (_FORGETTING, _MODELLING):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, each)
    except OSError as error:  # closed, or not permitted
        logger.debug("event=kv_path_not_forgotten cause=%s", error)
        return False
    return True


class Shape:
    """The pace and the buffers of one socket, set anew only where they change by more than 2 %."""

    def __init__(self, sock: socket.socket | None, socket_buffer: int, unsent_in_kernel: int) -> None:
        """Nothing is set where there is no network socket."""
        self.pace = 0.0
        """Bytes per second that the kernel sends at most; 0 where it is not limited, or the platform cannot."""
        self._sock = sock
        self._buffer = socket_buffer
        self._unsent = self._most_unsent = unsent_in_kernel

    def set_pace(self, bytes_per_s: float) -> None:
        """Let the kernel send at this rate at most; 0 lifts the limit. Raises OSError on a closed socket."""
        if abs(bytes_per_s - self.pace) <= _FRESH * self.pace and bool(bytes_per_s) == bool(self.pace):
            return
        if sys.platform != "linux" or self._sock is None:
            return
        rate = max(1, int(bytes_per_s)) if bytes_per_s else _UNLIMITED
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
        self.pace = bytes_per_s

    def fit_buffers(self, rtt_s: float, bytes_per_s: float) -> None:
        """Make room for twice what is under way at this rate: as much again may wait for its acknowledgement.

        Buffers only grow. What waits for its first transmission is bounded by time, within the bound it began with: the
        last frames of a transfer would otherwise lie with one slow connection while the others have nothing to do.
        Raises OSError on a closed socket.
        """
        if self._sock is None:
            return
        if bytes_per_s:
            unsent = int(bytes_per_s * max(_UNSENT_S, _UNSENT_RTTS * rtt_s))
            unsent = min(self._most_unsent, max(_LEAST_UNSENT, unsent))
            if abs(unsent - self._unsent) > _FRESH * self._unsent:
                _limit_unsent(self._sock, unsent)
                self._unsent = unsent
        wanted = int(2 * rtt_s * bytes_per_s)
        if wanted > self._buffer * (1 + _FRESH):
            self._buffer = wanted
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                _fix_buffer(self._sock, option, wanted)


def _limit_unsent(sock: socket.socket, nbytes: int) -> None:
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)


def _fix_buffer(sock: socket.socket, option: int, nbytes: int) -> None:
    """Fix a buffer, if that gives more than the kernel's own tuning would reach: fixing it ends the tuning."""
    tuned, limit = ("tcp_wmem", "wmem_max") if option == socket.SO_SNDBUF else ("tcp_rmem", "rmem_max")
    nbytes = min(nbytes, _sysctl(f"core/{limit}"))
    if 2 * nbytes > _sysctl(f"ipv4/{tuned}"):
        sock.setsockopt(socket.SOL_SOCKET, option, nbytes)


@cache
def _sysctl(name: str) -> int:
    """The last number of a network setting; 0 where the platform has none."""
    try:
        with open(f"/proc/sys/net/{name}") as file:
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def spread(rate: float, busy: int, mine: int, is_busy: bool) -> float:
    """The pace of each of ``mine`` connections of one peer, where ``busy`` ones of the whole node share ``rate``.

    A peer that is idle gets what it would get if it began now, so that it can begin at once; 0 is no limit.
    """
    return rate / max(1, busy if is_busy else busy + mine)
