"""A small burst of padded pings over idle connections, and what the times of its answers tell of the path. Sans-I/O.

An older peer answers them as it answers any ping: it passes over the padding. Transfers come first: a probe that one of
them overtakes is given up, and says nothing.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2

CHUNK_BYTES = 16 << 10
MAX_PROBE_BYTES = 4 << 20
PROBE_TOKENS = 1 << 48
"""Tokens from here on are probes'; those of the pings that test for life count from 1."""
SHORTEST_S = 0.005
"""Answers closer together may have been read at once."""
TELLING_SHARE = 0.5
"""The least share of a burst whose pace tells something: about what a growing window sends in its last round."""


class Probe:
    """One burst of about ``nbytes`` (at most 4 MiB), of which ``window`` bytes may leave before any is acknowledged."""

    def __init__(self, token: int, nbytes: int, window: int, rtt_s: float, now: float) -> None:
        self.token = token
        self.chunks = max(3, ceil(min(nbytes, MAX_PROBE_BYTES) / CHUNK_BYTES))
        self._window = max(1, window)
        self._rtt_s = rtt_s
        self._began = now
        self._answers: list[float] = []

    @property
    def nbytes(self) -> int:
        """What all its pings carry."""
        return self.chunks * CHUNK_BYTES

    @property
    def answered(self) -> bool:
        """Whether every ping is."""
        return len(self._answers) >= self.chunks

    def answer(self, now: float) -> None:
        """One more answer."""
        self._answers.append(now)

    def at_least(self) -> float:
        """Bytes per second at which the quickest telling part of the burst came through; 0 before that part has."""
        fewest, best = ceil(self.chunks * TELLING_SHARE), 0.0
        times = [self._began + self._rtt_s, *self._answers]
        for count in (fewest, self.chunks):
            for first, last in zip(times, times[count:], strict=False):
                best = max(best, count * CHUNK_BYTES / max(SHORTEST_S, last - first))
        return best

    def at_most(self) -> float:
        """Bytes per second that the path cannot exceed; 0 where the burst was over too soon to say.

        Counted from the first answer, whose time is a round trip as it is now: a least one may be of another route.
        Taken off are the round trips that the window may have needed to grow (it doubles in each, and even a whole one
        may be paced out over half of one), and the longest pause, in which somebody may have been kept from answering.
        """
        if not self.answered:
            return 0.0
        first, last = self._answers[0], self._answers[-1]
        pause = max(later - earlier for earlier, later in pairwise(self._answers))
        growing_s = (first - self._began) * (0.5 + log2(1 + self.nbytes / self._window))
        sending_s = last - first - pause - growing_s
        return (self.nbytes - 2 * CHUNK_BYTES) / sending_s if sending_s > growing_s / 2 else 0.0
