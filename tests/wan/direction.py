"""One direction of the link, without devices and without a clock: packets in, packets out when they are due."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import asdict, dataclass

QUEUE_BYTES = 4 << 20
"""About one bandwidth-delay product of 1 Gbps at 30 ms."""


@dataclass(frozen=True)
class LinkSettings:
    """Both directions alike. ``rate_bps`` counts IP packets; 0 stops the line, and what does not fit its queue is lost.

    ``loss`` is the chance of each packet to be lost, ``delay_s`` the way of each. ``near_open`` and ``far_open`` are
    the ports at which that end lets itself be connected to, None for all.
    """

    rate_bps: float = 1e9
    delay_s: float = 0.015
    loss: float = 0.0
    queue_bytes: int = QUEUE_BYTES
    seed: int = 1
    near_open: tuple[int, ...] | None = None
    far_open: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.rate_bps < 0 or self.delay_s < 0 or self.queue_bytes < 1 or not 0 <= self.loss <= 1:
            raise ValueError(f"no link has these settings: {asdict(self)}")


@dataclass
class Counters:
    """Packets and bytes since the link began. ``lost`` were lost on the line, ``overflowed`` found the queue full."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0
    overflowed: int = 0


class Direction:
    """A queue, a line of a certain rate, and a pipe of a certain delay, in this order. Times are in seconds."""

    def __init__(self, settings: LinkSettings, seed: int) -> None:
        self.settings = settings
        self.counters = Counters()
        self._random = random.Random(seed)
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._line_free_at = 0.0
        self._pipe: deque[tuple[float, bytes]] = deque()

    @property
    def idle(self) -> bool:
        """Whether no packet is on its way."""
        return not self._queue and not self._pipe

    def offer(self, packets: list[bytes], earliest: float, now: float) -> None:
        """Packets that came since ``earliest``, when somebody looked last.

        They may have come right after it: the line is charged from then on, or looking seldom would make it slower.
        """
        self._serve(earliest)
        self._line_free_at = max(self._line_free_at, earliest)
        loss, draw = self.settings.loss, self._random.random
        for packet in packets:
            if loss and draw() < loss:
                self.counters.lost += 1
            elif self._queued_bytes + len(packet) > self.settings.queue_bytes:
                self.counters.overflowed += 1
            else:
                self._queue.append(packet)
                self._queued_bytes += len(packet)
        self._serve(now)

    def due(self, now: float) -> list[bytes]:
        """The packets that have reached the other end by ``now``."""
        self._serve(now)
        pipe, ready = self._pipe, []
        while pipe and pipe[0][0] <= now:
            ready.append(pipe.popleft()[1])
        self.counters.packets += len(ready)
        self.counters.bytes += sum(map(len, ready))
        return ready

    def change(self, settings: LinkSettings, now: float) -> None:
        """New settings, for packets that are not yet on the line."""
        self._serve(now)
        if not self.settings.rate_bps:
            self._line_free_at = max(self._line_free_at, now)
        self.settings = settings

    def _serve(self, now: float) -> None:
        """Put packets on the line as long as it is free before ``now``."""
        rate, delay, queue = self.settings.rate_bps, self.settings.delay_s, self._queue
        if not rate:
            return
        free_at, took = self._line_free_at, 0
        while queue and free_at < now:
            packet = queue.popleft()
            took += len(packet)
            free_at += len(packet) * 8 / rate
            self._pipe.append((free_at + delay, packet))
        self._line_free_at = free_at
        self._queued_bytes -= took
