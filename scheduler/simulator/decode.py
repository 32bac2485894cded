"""A decode node: up to a batch of streams, each of which gets a token a step; a step may take longer the fuller it is.

Nothing is simulated step by step. Streams differ only in where they stop, so a node keeps one count of steps done, at
which each stream will end, and how fast that count grows until the next one joins, between two steps, or leaves. A node
may also compute prompts in chunks beside its streams: each step then takes ``chunk_s`` longer, of which they make use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil
from typing import Protocol

from scheduler.facts import CodecFacts, DecodeNodeFacts, PrefillCurve, PrefillNodeFacts
from scheduler.simulator.clock import Clock
from scheduler.simulator.jobs import Job
from scheduler.simulator.prefill import MOST_JOBS

STEP_ROUNDING = 1e-6
"""Of a step, what a count of them may be off by."""


class DecodeListener(Protocol):
    """Who is told what a decode node does."""

    def stream_begins(self, job: Job, now: float, first_at: float) -> None:
        """A request has its slot; its first token is there at ``first_at``."""
        ...

    def stream_ends(self, node: DecodeNode, job: Job, now: float) -> None:
        """A request is done."""
        ...

    def computed_in_place(self, node: DecodeNode, job: Job, now: float) -> None:
        """A prompt that was computed beside the streams is done."""
        ...


class StreamEnds:
    """The stream that ends first has ended; void once the node's pace or its first to end is another."""

    __slots__ = ("node", "pace")

    def __init__(self, node: DecodeNode, pace: int) -> None:
        self.node = node
        self.pace = pace

    def fire(self, now: float) -> None:
        """Let it go and take who waits."""
        if self.pace == self.node.pace:
            self.node.ended(now)


class MixedEnds:
    """The prompt that is computed beside the streams is done; void once the node's pace is another."""

    __slots__ = ("node", "turn")

    def __init__(self, node: DecodeNode, turn: int) -> None:
        self.node = node
        self.turn = turn

    def fire(self, now: float) -> None:
        """Hand it over and take the next."""
        if self.turn == self.node.turn:
            self.node.mixed_ended(now)


class DecodeNode:
    """``step_s[n]`` is the time of a step with n streams, for n from 0 to the batch.

    ``assigned`` counts what will decode here and is not done: it streams, waits for a slot or is being prefilled.
    ``emitted`` counts tokens, as of the last change. ``stream_s`` is how long the newest stream will take at this pace.
    """

    def __init__(
        self,
        name: str,
        step_s: Sequence[float],
        curve: PrefillCurve,
        clock: Clock,
        listener: DecodeListener,
        chunk_s: float = 0.0,
        codecs: tuple[CodecFacts, ...] = (),
    ) -> None:
        self.name = name
        self.batch = len(step_s) - 1
        self.curve = curve
        self.accepting = True
        self.assigned = 0
        self.active = 0
        self.pace = 0
        self.turn = 0
        self.emitted = 0.0
        self.stream_s = 0.0
        self._step_s = tuple(step_s)
        self._chunk_s = chunk_s
        self._codecs = codecs
        self._clock = clock
        self._listener = listener
        self._streams: list[tuple[float, int, Job]] = []
        self._waiting: deque[Job] = deque()
        self._steps = 0.0
        self._stepped_at = 0.0
        self._pace_s = step_s[0]
        self._due_at = 0.0
        self._mixed: deque[Job] = deque()
        self._mixed_left_s = 0.0
        self._mixed_queued_s = 0.0
        self._mixed_tokens = 0
        self._facts: DecodeNodeFacts | None = None

    @property
    def waiting(self) -> int:
        """Requests whose cache is here and that have no slot."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether nothing at all is left to do here."""
        return self.assigned == 0

    def facts(self, cached: int, held: int) -> DecodeNodeFacts:
        """What a decision may know of this node, which has ``cached`` and ``held`` tokens of the prompt."""
        if held:
            return DecodeNodeFacts(self.name, self.assigned, MOST_JOBS, self.curve, cached, held, self._codecs)
        found = self._facts
        if found is None or found.running != self.assigned:
            found = self._facts = DecodeNodeFacts(self.name, self.assigned, MOST_JOBS, self.curve, codecs=self._codecs)
        return found

    def mixing_facts(self, cached: int, held: int, now: float) -> PrefillNodeFacts:
        """This node as one that prefills beside its streams: slower by the part of a step that prompts get."""
        share = self._mixing_share()
        curve = self.curve
        slow = PrefillCurve(curve.fixed_s / share, curve.token_s / share, curve.square_s / share)
        left_s = self._mixed_queued_s
        if self._mixed:
            left_s += self._mixed_left_s - (now - self._stepped_at) * self._progress()
        return PrefillNodeFacts(
            self.name, self._mixed_tokens, MOST_JOBS, slow, cached, held, queued_s=max(0.0, left_s) / share
        )

    def ready(self, job: Job, now: float) -> None:
        """A request's cache is here."""
        if self.active < self.batch:
            self._begin(job, now)
        else:
            self._waiting.append(job)

    def mix(self, job: Job, now: float) -> None:
        """Compute a prompt here, beside the streams."""
        job.service_s = self.curve.seconds(job.cached, job.stop)
        self._mixed_tokens += job.stop - job.cached
        if self._mixed:
            self._mixed.append(job)
            self._mixed_queued_s += job.service_s
            return
        self._count(now)
        self._mixed.append(job)
        self._mixed_left_s = job.service_s
        self._repace(now)

    def mixing(self) -> list[Job]:
        """What is computed or waits to be computed beside the streams."""
        return list(self._mixed)

    def unmix(self, job: Job, now: float) -> bool:
        """Forget a prompt, if it is computed or waits to be here; False where it is not."""
        if job not in self._mixed:
            return False
        self._count(now)
        if self._mixed[0] is job:
            self._first_mixed_goes()
        else:
            self._mixed.remove(job)
            self._mixed_tokens -= job.stop - job.cached
            self._mixed_queued_s -= job.service_s
        self._repace(now)
        return True

    def empty(self, now: float) -> list[Job]:
        """Forget every stream and who waits for a slot, and say who that was; nothing is computed here any more."""
        gone = [job for _, _, job in self._streams] + list(self._waiting)
        self._count(now)
        self._streams.clear()
        self._waiting.clear()
        self.active = 0
        self.assigned = 0
        self._repace(now)
        return gone

    def ended(self, now: float) -> None:
        """The stream that ends first has ended."""
        self._count(now)
        end, _, job = heappop(self._streams)
        self._steps = max(self._steps, end)  # what is missing is rounding
        self._due_at = -1.0
        self.active -= 1
        if self._waiting:
            self._begin(self._waiting.popleft(), now, freed=True)
        else:
            self._repace(now)
        self.assigned -= 1
        self._listener.stream_ends(self, job, now)

    def mixed_ended(self, now: float) -> None:
        """The prompt that is computed here is done."""
        self._count(now)
        job = self._first_mixed_goes()
        self._repace(now)
        self._listener.computed_in_place(self, job, now)

    def _first_mixed_goes(self) -> Job:
        """The prompt that is computed here leaves, done or not, and the next is computed."""
        job = self._mixed.popleft()
        self._mixed_tokens -= job.stop - job.cached
        if self._mixed:
            self._mixed_left_s = self._mixed[0].service_s
            self._mixed_queued_s -= self._mixed_left_s
        else:
            self._mixed_left_s = self._mixed_queued_s = 0.0
        return job

    def _begin(self, job: Job, now: float, freed: bool = False) -> None:
        if not freed:
            self._count(now)
        joins = ceil(self._steps - STEP_ROUNDING)  # it takes part from the next step on
        waits = max(0.0, joins - self._steps)
        self.active += 1
        self.emitted -= waits
        heappush(self._streams, (joins + job.output, job.index, job))
        self._repace(now)
        self.stream_s = job.output * self._pace_s
        self._listener.stream_begins(job, now, now + (waits + 1.0) * self._pace_s)

    def _count(self, now: float) -> None:
        """Bring the count of steps, and what was computed beside them, up to now."""
        since = now - self._stepped_at
        if since > 0:
            if self._mixed:
                self._mixed_left_s -= since * self._progress()
            if self.active:
                steps = since / self._pace_s
                self._steps += steps
                self.emitted += steps * self.active
            self._stepped_at = now

    def _progress(self) -> float:
        """Seconds of a prompt's prefill that are done in a second."""
        return self._chunk_s / self._pace_s if self.active else 1.0

    def _mixing_share(self) -> float:
        """The same, were a prompt added now."""
        return self._chunk_s / (self._step_s[self.active] + self._chunk_s) if self.active else 1.0

    def _repace(self, now: float) -> None:
        """After a change, and with the count up to date: how long steps take now, and when something ends next."""
        pace_s = self._step_s[self.active] + (self._chunk_s if self._mixed else 0.0)
        self.turn += 1
        if self._mixed:
            self._pace_s = pace_s
            self._clock.at(now + max(0.0, self._mixed_left_s) / self._progress(), MixedEnds(self, self.turn))
        if self._streams:
            due_at = now + max(0.0, self._streams[0][0] - self._steps) * pace_s
            if pace_s != self._pace_s or abs(due_at - self._due_at) > 1e-9:
                self._pace_s, self._due_at = pace_s, due_at
                self.pace += 1
                self._clock.at(due_at, StreamEnds(self, self.pace))
        else:
            self._pace_s = pace_s
            self._due_at = 0.0
            self.pace += 1
