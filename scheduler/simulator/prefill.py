"""A prefill node: one prompt at a time, in chunks, in the order it was told to keep.

Chunks cost no events: a prompt's time is known when it starts, and the end of a chunk matters only where somebody with
a better place waits for it. A prompt that is set aside keeps its chunks and pays its fixed cost once.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import floor, inf, sqrt
from typing import Protocol

from scheduler.facts import CodecFacts, PrefillCurve, PrefillNodeFacts
from scheduler.simulator.clock import Clock
from scheduler.simulator.jobs import Job
from scheduler.simulator.orders import Ordering

MOST_JOBS = 1 << 30
"""Slots that a node announces: what is simulated drops nothing."""


class PrefillListener(Protocol):
    """Who is told what a prefill node does."""

    def prefill_begins(self, node: PrefillNode, job: Job, now: float) -> float:
        """A prompt runs from now on for the first time; answers how many bytes its export keeps in the pool."""
        ...

    def prefill_pauses(self, job: Job, now: float) -> None:
        """A prompt is set aside at a chunk's end."""
        ...

    def prefill_resumes(self, job: Job, now: float) -> None:
        """A prompt that was set aside runs again."""
        ...

    def prefill_ends(self, node: PrefillNode, job: Job, now: float) -> None:
        """A prompt is computed."""
        ...


class PrefillEnds:
    """The prompt that runs is computed; void once something else runs."""

    __slots__ = ("node", "run")

    def __init__(self, node: PrefillNode, run: int) -> None:
        self.node = node
        self.run = run

    def fire(self, now: float) -> None:
        """Finish it and take the next."""
        if self.run == self.node.run:
            self.node.ended(now)


class ChunkEnds:
    """A chunk of the prompt that runs is computed, and somebody may go before its next."""

    __slots__ = ("node", "run")

    def __init__(self, node: PrefillNode, run: int) -> None:
        self.node = node
        self.run = run

    def fire(self, now: float) -> None:
        """Change over if that is still due."""
        if self.run == self.node.run:
            self.node.chunk_ended(now)


class PrefillNode:
    """``pool_bytes`` bound the exports that are computed or under way; a prompt starts once its own has room."""

    def __init__(
        self,
        name: str,
        cluster: str,
        curve: PrefillCurve,
        chunk_tokens: int,
        ordering: Ordering,
        clock: Clock,
        listener: PrefillListener,
        pool_bytes: float = inf,
        codecs: tuple[CodecFacts, ...] = (),
    ) -> None:
        self.name = name
        self.cluster = cluster
        self.curve = curve
        self.chunk_tokens = chunk_tokens
        self.pool_bytes = pool_bytes
        self.accepting = True
        self.running: Job | None = None
        self.ends_at = 0.0
        self.run = 0
        self.queued_tokens = 0
        self.busy_s = 0.0
        self.exporting = 0.0
        self._ordering = ordering
        self._clock = clock
        self._listener = listener
        self._waiting: list[tuple[float, int, Job]] = []
        self._waiting_s = 0.0
        self._watching = False
        self._codecs = codecs
        self._idle_facts = PrefillNodeFacts(name, 0, MOST_JOBS, curve, codecs=codecs, queued_s=0.0)

    @property
    def waiting(self) -> int:
        """Prompts that do not run yet, or not now."""
        return len(self._waiting)

    def queued_s(self, now: float) -> float:
        """Seconds until all that is here is computed."""
        return self._waiting_s + (self.ends_at - now if self.running is not None else 0.0)

    def facts(self, cached: int, held: int, now: float) -> PrefillNodeFacts:
        """What a decision may know of this node, which has ``cached`` and ``held`` tokens of the prompt."""
        if self.running is None and not held:
            return self._idle_facts
        wait_s = self._waiting_s + (self.ends_at - now if self.running is not None else 0.0)
        return PrefillNodeFacts(
            self.name, self.queued_tokens, MOST_JOBS, self.curve, cached, held, self._codecs, queued_s=wait_s
        )

    def submit(self, job: Job, now: float) -> None:
        """Take a prompt."""
        service_s = self.curve.seconds(job.cached, job.stop)
        job.service_s = service_s
        job.done_s = 0.0
        self.queued_tokens += job.stop - job.cached
        job.key = key = self._ordering.key(job.arrived, service_s, service_s)
        heappush(self._waiting, (key, job.index, job))
        self._waiting_s += service_s
        if self.running is None:
            self._next(now)
        elif self._ordering.preempts and not self._watching:
            self._watch(now)

    def jobs(self) -> list[Job]:
        """What runs and what waits here."""
        return [job for _, _, job in self._waiting] + ([] if self.running is None else [self.running])

    def withdraw(self, job: Job, now: float) -> None:
        """Forget a prompt, if it waits or runs here."""
        if job is not self.running and all(other is not job for _, _, other in self._waiting):
            return
        self.queued_tokens -= job.stop - job.cached
        if job is self.running:
            self.busy_s -= self.ends_at - now
            self.running = None
            self.run += 1
            self._next(now)
            return
        self._waiting = [entry for entry in self._waiting if entry[2] is not job]
        heapify(self._waiting)
        self._waiting_s -= job.service_s - job.done_s

    def shed(self, which: Callable[[Job], bool], now: float) -> list[Job]:
        """Give up those that wait here, have not begun and are meant; what has begun stays."""
        gone = [job for _, _, job in self._waiting if not job.begun and which(job)]
        leave = {job.index for job in gone}
        self._waiting = [entry for entry in self._waiting if entry[2].index not in leave]
        heapify(self._waiting)
        for job in gone:
            self.queued_tokens -= job.stop - job.cached
        self._waiting_s = sum(job.service_s - job.done_s for _, _, job in self._waiting)
        if self.running is None:
            self._next(now)  # who was given up may have stood before one that has room
        return gone

    def exported(self, nbytes: float, now: float) -> None:
        """An export has left, and its room with it."""
        self.exporting -= nbytes
        if self.running is None and self._waiting:
            self._next(now)

    def ended(self, now: float) -> None:
        """The prompt that runs is computed."""
        job = self.running
        assert job is not None
        self.running = None
        self.run += 1
        self.queued_tokens -= job.stop - job.cached
        job.done_s = job.service_s
        self._listener.prefill_ends(self, job, now)
        if self.running is None:
            self._next(now)

    def chunk_ended(self, now: float) -> None:
        """Set the prompt that runs aside if somebody has a better place by now."""
        self._watching = False
        job = self.running
        assert job is not None
        left_s = self.ends_at - now
        key = self._ordering.key(job.arrived, job.service_s, left_s)
        if self._waiting and self._waiting[0][0] < key:
            job.done_s = job.service_s - left_s
            job.key = key
            self.busy_s -= left_s
            self.running = None
            self.run += 1
            heappush(self._waiting, (key, job.index, job))
            self._waiting_s += left_s
            self._listener.prefill_pauses(job, now)
            self._next(now)

    def _next(self, now: float) -> None:
        if not self._waiting:
            self._waiting_s = 0.0  # what is left of it is rounding
            return
        job = self._waiting[0][2]
        if job.begun or self.exporting <= 0.0 or self.exporting + job.wire_bytes <= self.pool_bytes:
            heappop(self._waiting)
        else:
            # what was set aside holds room already, and leaves it to others only once it is done
            entry = min([entry for entry in self._waiting if entry[2].begun], default=None)
            if entry is None:
                return
            job = entry[2]
            self._waiting.remove(entry)
            heapify(self._waiting)
        left_s = job.service_s - job.done_s
        self._waiting_s -= left_s
        self.running = job
        self.run += 1
        self.ends_at = now + left_s
        self.busy_s += left_s
        self._watching = False
        self._clock.at(self.ends_at, PrefillEnds(self, self.run))
        if job.begun:
            self._listener.prefill_resumes(job, now)
        else:
            job.begun = True
            self.exporting += self._listener.prefill_begins(self, job, now)

    def _watch(self, now: float) -> None:
        """Look again at the next chunk's end, if the prompt that came would go before what runs."""
        job = self.running
        assert job is not None
        end_s = self._chunk_end_s(job, job.service_s - (self.ends_at - now))
        if end_s >= job.service_s:
            return
        left_s = job.service_s - end_s
        if self._waiting[0][0] < self._ordering.key(job.arrived, job.service_s, left_s):
            self._watching = True
            self._clock.at(max(now, self.ends_at - left_s), ChunkEnds(self, self.run))

    def _chunk_end_s(self, job: Job, done_s: float) -> float:
        """How much of a prompt is done at the next end of a chunk, in seconds of service."""
        curve, start = self.curve, job.cached
        work = max(0.0, done_s - curve.fixed_s) + start * (curve.token_s + curve.square_s * start)
        if curve.square_s > 0:
            root = sqrt(curve.token_s * curve.token_s + 4 * curve.square_s * work)
            position = (root - curve.token_s) / (2 * curve.square_s)
        else:
            position = work / curve.token_s
        end = (floor(position / self.chunk_tokens + 1e-9) + 1) * self.chunk_tokens
        return curve.seconds(start, min(end, job.stop))
