"""One external engine as the gateway sees it: whether it answers, what it was given, how fast it prefills."""

from __future__ import annotations

from gateway.fleet.config import EngineConfig
from scheduler.breaker import Breaker, Call
from scheduler.prefill_curve import PrefillTimes


class Engine:
    """Begins as one that was never heard of, and is given nothing until it was found well. Times are handed in."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.running = 0
        """Requests that it has now, a split one's prefill or decode counted as one."""
        self.prefilling_tokens = 0
        """Of the prompts that it computes now."""
        self.speed = PrefillTimes()
        self.breaker = Breaker()
        self.trouble: str | None = "not checked yet"
        """Why it is given nothing; None while it is well."""
        self.draining = False
        """It is in the file no more: it finishes what it has."""
        self.engine_ids: dict[int, str] = {}
        """What the KV of each data-parallel rank is announced under, where a bootstrap server tells."""
        self.given_tokens = 0
        """Of all prompts that it was ever given to compute."""
        self.used = 0
        """How often it was given something."""
        self._ranks = [0] * config.ranks
        self._prefills = 0
        self._overlaps = 0

    @property
    def name(self) -> str:
        """By which decisions know it."""
        return self.config.name

    @property
    def node_id(self) -> str:
        """Its name, as the scheduler calls it."""
        return self.config.name

    @property
    def free_slots(self) -> int:
        """Requests that it may still take."""
        return max(0, self.config.max_running - self.running)

    def accepting(self, now: float) -> bool:
        """Whether new work may go there."""
        return self.trouble is None and not self.draining and self.breaker.admits(now)

    def begin(self, now: float, prefill_tokens: int = 0, rank: int | None = None) -> Use:
        """A request goes there, with so many tokens to compute. ``rank``: where it is better off; else the emptiest."""
        self.running += 1
        self.used += 1
        if self.config.ranks == 1:
            rank = None
        elif rank is None or not 0 <= rank < self.config.ranks:
            rank = min(range(self.config.ranks), key=self._ranks.__getitem__)
        if rank is not None:
            self._ranks[rank] += 1
        if prefill_tokens:
            self._overlaps += bool(self._prefills)
            self._prefills += 1
            self.prefilling_tokens += prefill_tokens
            self.given_tokens += prefill_tokens
        return Use(self, self.breaker.begin(now), rank, prefill_tokens, self._overlaps, self._prefills == 1)

    def _computed(self, tokens: int) -> None:
        self._prefills -= 1
        self.prefilling_tokens -= tokens

    def _ended(self, rank: int | None) -> None:
        self.running -= 1
        if rank is not None:
            self._ranks[rank] -= 1


class Use:
    """One request at one engine. ``end`` must be called."""

    def __init__(
        self, engine: Engine, call: Call, rank: int | None, prefill_tokens: int, overlaps: int, alone: bool
    ) -> None:
        self.engine = engine
        self.rank = rank
        self._call = call
        self._tokens = prefill_tokens
        self._overlaps = overlaps
        self._alone = alone
        self._took_s: float | None = None
        self._ended = False

    def computed(self, seconds: float) -> None:
        """Its prompt is computed, and took so long."""
        if self._tokens and self._alone and self._overlaps == self.engine._overlaps:
            self._took_s = seconds
        self._compute_over()

    def learn(self, start: int, stop: int) -> None:
        """That were tokens [start, stop): what the engine is known by, where it did nothing else meanwhile."""
        took, self._took_s = self._took_s, None
        if took is not None:
            self.engine.speed.observe(start, stop, took)

    def end(self, well: bool | None, now: float) -> None:
        """It is over: well, or not, or None where that says nothing of the engine. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._compute_over()
        self.engine._ended(self.rank)
        self._call.end(well, now)

    def _compute_over(self) -> None:
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self.engine._computed(tokens)
