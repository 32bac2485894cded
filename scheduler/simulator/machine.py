"""A machine of the local cluster: it holds both sides, has one role, and changes it by draining first."""

from __future__ import annotations

from enum import StrEnum

from scheduler.simulator.decode import DecodeNode
from scheduler.simulator.fleet import Role
from scheduler.simulator.prefill import PrefillNode


class State(StrEnum):
    """SERVING: in its role. DRAINING: takes nothing new. CONVERTING: empty, becoming the other. LOST: gone."""

    SERVING = "serving"
    DRAINING = "draining"
    CONVERTING = "converting"
    LOST = "lost"


class Machine:
    """``since`` is when its state or role changed last; ``changes`` counts those, so that what waits can be void."""

    __slots__ = ("changes", "decode", "name", "prefill", "role", "since", "state")

    def __init__(self, name: str, role: Role, prefill: PrefillNode, decode: DecodeNode) -> None:
        self.name = name
        self.role = role
        self.prefill = prefill
        self.decode = decode
        self.state = State.SERVING
        self.since = 0.0
        self.changes = 0
        self._announce()

    @property
    def drained(self) -> bool:
        """Whether nothing is left of what its role had to do."""
        if self.role is Role.PREFILL:
            return self.prefill.running is None and not self.prefill.waiting
        return self.decode.idle

    def becomes(self, state: State, now: float) -> None:
        """Change the state, and whether it takes work."""
        self.state = state
        self.since = now
        self.changes += 1
        self._announce()

    def takes(self, role: Role, now: float) -> None:
        """Serve in a role."""
        self.role = role
        self.becomes(State.SERVING, now)

    def _announce(self) -> None:
        serving = self.state is State.SERVING
        self.prefill.accepting = serving and self.role is Role.PREFILL
        self.decode.accepting = serving and self.role is Role.DECODE
