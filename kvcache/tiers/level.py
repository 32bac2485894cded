"""One tier at work: what its bytes lie in, how it does, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.tiers.costs import TierSpeed
from kvcache.tiers.health import Health
from kvcache.tiers.report import TierReport
from kvcache.tiers.store import TierStore


@dataclass(slots=True)
class Count:
    """Since the start; as ``TierReport`` has them."""

    spills: int = 0
    spilled_bytes: int = 0
    reloads: int = 0
    reloaded_bytes: int = 0
    hits: int = 0
    hit_tokens: int = 0
    drops: int = 0
    damaged: int = 0


@dataclass(eq=False, slots=True)
class Level:
    """``note`` says what an operator should know of it although it works."""

    name: str
    store: TierStore
    capacity: int
    note: str = ""
    speed: TierSpeed = field(default_factory=TierSpeed)
    health: Health = field(default_factory=Health)
    count: Count = field(default_factory=Count)

    def report(self, used: int, entries: int) -> TierReport:
        """As a heartbeat tells it."""
        count = self.count
        return TierReport(
            self.name,
            self.store.medium,
            self.health.failure or self.note,
            self.capacity,
            used,
            entries,
            count.spills,
            count.spilled_bytes,
            count.reloads,
            count.reloaded_bytes,
            count.hits,
            count.hit_tokens,
            count.drops,
            count.damaged,
            self.speed.bytes_per_s or 0.0,
        )
