"""Planned conversions: the local machines share the two roles over time, as no whole split does.

Between the two whole splits around the best fractional one, the site swings one machine to and fro: to decode once
requests wait too long for a slot, to prefill once prompts do and slots are free. So the share of time in each follows
from the traffic, and conversions are no more frequent than the waits that are allowed make necessary.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.simulator.fleet import Conversion, Role
from scheduler.simulator.machine import Machine, State
from scheduler.simulator.world import World


@dataclass(frozen=True, slots=True)
class TimeShare:
    """Swings between ``least`` and ``most`` prefill machines.

    ``prefill_wait_s``: seconds of work in front of the emptiest local prefill node, from which one more is worth a
    conversion. ``decode_wait_s``: the same of the wait for a slot. Both are looked at ``every_s``.
    """

    least: int
    most: int
    prefill_wait_s: float = 15.0
    decode_wait_s: float = 15.0
    every_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.least < self.most:
            raise ValueError(f"time share: least must be below most, got {self.least} and {self.most}")

    def look(self, world: World, now: float) -> list[Conversion]:
        """At most one conversion, and none while a machine is changing."""
        machines = world.machines.values()
        if any(machine.state is not State.SERVING for machine in machines):
            return []
        prefilling = [m for m in machines if m.role is Role.PREFILL]
        decoding = [m for m in machines if m.role is Role.DECODE]
        slot_wait_s = decode_wait_s(decoding)
        if len(prefilling) > self.least and slot_wait_s >= self.decode_wait_s:
            least = min(prefilling, key=lambda m: (m.prefill.queued_s(now), m.name))
            return [Conversion(now, least.name, Role.DECODE)]
        wait_s = min((m.prefill.queued_s(now) for m in prefilling), default=0.0)
        if len(prefilling) < self.most and wait_s >= self.prefill_wait_s and slot_wait_s < self.decode_wait_s / 2:
            emptiest = min(decoding, key=lambda m: (m.decode.assigned, m.name))
            return [Conversion(now, emptiest.name, Role.PREFILL)]
        return []


def decode_wait_s(decoding: list[Machine]) -> float:
    """How long a request that came to the decode nodes now would wait for a slot, by what they did so far."""
    waiting = sum(m.decode.waiting for m in decoding)
    slots = sum(m.decode.batch for m in decoding)
    stream_s = [m.decode.stream_s for m in decoding if m.decode.stream_s > 0]
    return waiting * sum(stream_s) / len(stream_s) / slots if stream_s and slots else 0.0
