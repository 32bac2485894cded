"""What the controller wants done, and whoever wants it: the seam that the gateway and the simulator drive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from scheduler.controller.observation import Observation, Stage


class Convert(msgspec.Struct, frozen=True, tag="convert"):
    """Take a node out of its stage and put it into the other.

    ``epoch`` fences: a node refuses one that is not above the last that it obeyed.
    """

    node_id: str
    stage: Stage
    epoch: int
    reason: str
    proposal: int


class SetThreshold(msgspec.Struct, frozen=True, tag="threshold"):
    """Offload prompts of more uncached tokens than these from now on."""

    tokens: float
    reason: str


Action = Convert | SetThreshold


class LongTermController(Protocol):
    """Decides which nodes prefill. Time in seconds, from any origin, never backwards."""

    def step(self, seen: Observation, now: float) -> Sequence[Action]:
        """What to do now, given all that was seen since the last step."""
        ...
