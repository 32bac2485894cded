"""Whether a prefill node gets on with what it was given, judged by the signs of work that come from it.

A node may beat, take jobs and do none of them. Its jobs are late one by one, and the later the more of them wait there;
that nothing at all moves is known long before. Signs are its word that a job is computed, a transfer of it that
arrives, KV that leaves it, and what it has computed of a job that was called back; that a job has begun is none, for a
node says so when it has found room for it. Only what is still to be computed is waited for: the rest is the link's.

A node that is slow gives signs, too, only later: one that would need four times what was predicted for a whole job has
shown nothing for that long before it counts as stuck. Where KV was seen to leave while nothing but computing was at
hand, the next chunk's KV is a sign as well, and no whole job need be waited for.

Time is handed in: that at which the node was last heard. So whoever slept, or could not hear, blames nobody.
"""

from __future__ import annotations

from scheduler.accuracy import MOST

LEAST_S = 5.0
"""Nobody is stuck sooner: engines pause, and a node that says nothing at all is lost after about that long."""
TELLING_BEATS = 2
"""After so many reports in a row of KV that left while jobs were computed, and nothing else, a node does that."""


class Progress:
    """Of one node: what it has to compute, and for how long nothing has come of it. Jobs are known by their names."""

    def __init__(self) -> None:
        self.sends_early = False
        """Whether KV leaves it while its job is still computed."""
        self._computing: dict[str, tuple[float, float]] = {}
        self._heads: set[str] = set()
        self._due = 0.0, 0.0
        self._sending: set[str] = set()
        self._silent_s = 0.0
        self._since: float | None = None
        self._carried: int | None = None
        self._beats = 0

    def begin(self, job: str, expected_s: float, chunk_s: float, now: float) -> None:
        """A job was sent there, which takes ``expected_s`` once its turn has come; a chunk of it takes ``chunk_s``."""
        self._computing[job] = expected_s, chunk_s
        if len(self._computing) == 1:
            self._since = now
            self._wait_for_all()

    def moved(self, now: float) -> None:
        """A sign of work, or what excuses that there was none so far."""
        self._silent_s, self._due = 0.0, (0.0, 0.0)
        if self._computing:
            self._since = now
        self._wait_for_all()

    def computed(self, job: str, now: float) -> None:
        """A job is computed, and its KV is under way; unknown ones are signs, too."""
        self._beats = 0
        if job in self._computing:
            self._sending.add(job)
            self._drop(job, now)
        self.moved(now)

    def end(self, job: str, now: float) -> None:
        """A job is over, well or not; that is no sign. Idempotent."""
        self._sending.discard(job)
        self._drop(job, now)

    def told(self, carried_bytes: int, now: float) -> None:
        """What the node says that it has sent so far. Less than before began anew."""
        before, self._carried = self._carried, carried_bytes
        if before is None or carried_bytes <= before:
            return
        if self._computing and not self._sending:
            self._beats += 1
            self.sends_early = self.sends_early or self._beats >= TELLING_BEATS
        self.moved(now)

    def silent_s(self, now: float) -> float:
        """How long there has been work and no sign of it."""
        return self._silent_s + (0.0 if self._since is None else max(0.0, now - self._since))

    def patience_s(self) -> float | None:
        """How long there may be none; None where nothing is to be computed.

        Any of the jobs that were there at the last sign may be the one that runs. What came since explains nothing,
        until all of those were called back.
        """
        if not self._computing:
            return None
        expected_s, chunk_s = self._due
        return max(LEAST_S, MOST * (chunk_s if self.sends_early else expected_s))

    def stuck(self, now: float) -> bool:
        """Whether it does nothing, as far as was heard of it at ``now``."""
        patience = self.patience_s()
        return patience is not None and self.silent_s(now) >= patience

    def _wait_for_all(self) -> None:
        """The next sign may take as long as any of the jobs that are there, or has been waited for so far."""
        jobs = [self._due, *self._computing.values()]
        self._heads = set(self._computing)
        self._due = max(expected_s for expected_s, _ in jobs), max(chunk_s for _, chunk_s in jobs)

    def _drop(self, job: str, now: float) -> None:
        if self._computing.pop(job, None) is None:
            return
        self._heads.discard(job)
        if self._computing and not self._heads:
            self._wait_for_all()
        if not self._computing and self._since is not None:
            self._silent_s += max(0.0, now - self._since)
            self._since = None
