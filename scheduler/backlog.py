"""What was sent to one prefill node and is not computed yet, and how long that will take it. Time is handed in.

A node says when it begins with a job, which is when it has room for it; it computes one at a time, the least rank
first, one to its end unless a job of lesser rank begins meanwhile. So time passes for the first of them alone: counted
for each that has begun, a queue would seem to be done while most of it has not been looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.admission.node_order import LAST
from scheduler.facts import PrefillCurve


@dataclass(slots=True)
class _Job:
    """Tokens [start, stop), of which ``done_s`` seconds are computed."""

    start: int
    stop: int
    rank: int
    begun: bool = False
    done_s: float = 0.0


class Backlog:
    """By the names of jobs."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._at = 0.0
        self.tokens = 0
        """Of all jobs, computed or not."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def sent(self, job: str, start: int, stop: int, rank: int) -> None:
        """Tokens [start, stop) are to be computed there, in the turn that ``rank`` gives."""
        self.ended(job, self._at)
        self._jobs[job] = _Job(start, stop, rank)
        self.tokens += stop - start

    def begun(self, job: str, start: int, now: float) -> None:
        """The node has begun with it, and need not compute what is before ``start``."""
        self._pass(now)
        one = self._jobs.get(job)
        if one is not None:
            self.tokens += one.start - start
            one.start, one.begun = start, True

    def ended(self, job: str, now: float) -> None:
        """It is computed, or nobody wants it any more. Idempotent."""
        self._pass(now)
        one = self._jobs.pop(job, None)
        if one is not None:
            self.tokens -= one.stop - one.start

    def seconds(self, curve: PrefillCurve, now: float, last: bool) -> float:
        """Until all of it is computed: of what comes after all other, or of that other."""
        self._pass(now)
        total = 0.0
        for one in self._jobs.values():
            if (one.rank >= LAST) is last:
                left = curve.seconds(one.start, one.stop) - one.done_s
                if left > 0:
                    total += left
        return total

    def _pass(self, now: float) -> None:
        """Time went to the job that runs, also where it takes longer than was thought."""
        passed, self._at = now - self._at, max(now, self._at)
        if passed <= 0:
            return
        runs: _Job | None = None
        for one in self._jobs.values():
            if one.begun and (runs is None or one.rank < runs.rank):
                runs = one
        if runs is not None:
            runs.done_s += passed
