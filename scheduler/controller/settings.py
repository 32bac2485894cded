"""What steers the controller, checked as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """``OBSERVE`` records what it would do, ``ADVISE`` asks a person, ``AUTO`` does it."""

    OBSERVE = "observe"
    ADVISE = "advise"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Times in seconds; gains are ratios of capacities.

    A plan starts at ``start_gain`` and is carried on down to ``carry_on_gain``. ``sureness`` is how many standard
    errors the evidence may be off by without the gain vanishing. ``busy_floor`` is the load, as a share of the present
    capacity, below which no conversion is worth its trouble. A conversion pays if what it gains in ``payback_s``
    exceeds what it costs in the ``conversion_s`` (drain not included) that a node is away.
    """

    mode: Mode = Mode.OBSERVE
    dwell_s: float = 60.0
    conversion_s: float = 30.0
    start_gain: float = 1.06
    carry_on_gain: float = 1.02
    sureness: float = 2.0
    busy_floor: float = 0.6
    payback_s: float = 1800.0
    most_moving: int = 4
    window_requests: int = 4000
    least_requests: int = 64
    threshold_step: float = 0.03
    proposal_s: float = 900.0
    refusal_s: float = 3600.0
    after_failure_s: float = 600.0
    replica_load: float = 0.8

    def __post_init__(self) -> None:
        for name in ("dwell_s", "conversion_s", "payback_s", "proposal_s", "refusal_s", "after_failure_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 1.0 <= self.carry_on_gain <= self.start_gain:
            raise ValueError(
                f"carry_on_gain must lie between 1 and start_gain {self.start_gain}, got {self.carry_on_gain}"
            )
        if self.sureness < 0:
            raise ValueError(f"sureness must not be negative, got {self.sureness}")
        if not 0 <= self.busy_floor < 1 or not 0 < self.replica_load <= 1 or not 0 <= self.threshold_step < 1:
            raise ValueError("busy_floor and threshold_step must lie in [0, 1), replica_load in (0, 1]")
        if not 1 <= self.least_requests <= self.window_requests or self.most_moving < 1:
            raise ValueError("least_requests must lie between 1 and window_requests, most_moving be at least 1")
