"""How fast the path to one peer is: from what its transfers deliver, and from probes while there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvcache.transport.connection import Connection
from kvcache.transport.delivery import is_paced
from kvcache.transport.link import PeerFigures, least_rtt_s
from kvcache.transport.probe import CHUNK_BYTES, PROBE_TOKENS, Probe
from kvcache.transport.sendqueue import SendQueue
from kvcache.wire import Ping, encode_frame

PROBE_S = 2.0
"""A probe that is not answered by then says nothing."""


class PathMeasure:
    """Belongs to a peer, whose ``queue`` its probes go through and whose ``figures`` hold what it finds."""

    def __init__(self, queue: SendQueue, figures: PeerFigures, version: int) -> None:
        self._queue = queue
        self._figures = figures
        self._version = version
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = None
        self._waited_s = 0.0
        self._probe: Probe | None = None
        self._probes = 0
        self._probe_end: asyncio.TimerHandle | None = None
        self._on_measured: Callable[[], None] = lambda: None

    def probe(self, connections: Sequence[Connection], nbytes: int, on_measured: Callable[[], None]) -> bool:
        """Queue a probe of about ``nbytes``; ``on_measured`` is called when the figures hold what came of it.

        False where the path is not idle, or its round trip unknown.
        """
        rtt_s = least_rtt_s([connection.figures for connection in connections])
        if self._probe is not None or self._queue or not rtt_s or any(c.blocked for c in connections):
            return False
        window = sum(connection.forget_path() for connection in connections)
        self._probes += 1
        probe = Probe(PROBE_TOKENS + self._probes, nbytes, window, rtt_s, self._loop.time())
        self._probe, self._on_measured = probe, on_measured
        self._probe_end = self._loop.call_later(PROBE_S, self.give_up)
        self._figures.probe_bytes += probe.nbytes
        self._queue.push_probe(encode_frame(Ping(probe.token, bytes(CHUNK_BYTES)), self._version), probe.chunks)
        return True

    def answered(self, token: int, now: float, pace: float) -> None:
        """A ping of this probe, or of an older one, was answered."""
        probe = self._probe
        if probe is None or token != probe.token:
            return
        probe.answer(now)
        if probe.answered:
            at_most = probe.at_most()
            self._figures.delivery.saw(now, probe.at_least(), 0.0 if is_paced(at_most, pace) else at_most)
            self.give_up()
            self._on_measured()

    def give_up(self) -> None:
        """The probe is over, or something more important has come; harmless when there is none."""
        if self._probe is not None and self._probe_end is not None:
            self._probe_end.cancel()
            self._probe = None
            self._queue.drop_probe()

    def waits(self, all_wait: bool) -> None:
        """Whether, from now on, all connections wait for room in the kernel's buffers."""
        if all_wait and self._waits_since is None:
            self._waits_since = self._loop.time()
        elif not all_wait and self._waits_since is not None:
            self._waited_s += self._loop.time() - self._waits_since
            self._waits_since = None

    def look(self, connections: Sequence[Connection], pace: float) -> None:
        """Take what was delivered since the last look."""
        now = self._loop.time()
        waited = self._waited_s + (0.0 if self._waits_since is None else now - self._waits_since)
        figures = [connection.figures for connection in connections]
        self._figures.delivery.look(now, self._figures.counts(figures, waited, pace))
