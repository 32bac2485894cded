"""One run: a fleet, a policy and traffic in, records out. Deterministic; what is random was drawn into the traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.simulator.fleet import Fleet, Settings
from scheduler.simulator.mishaps import Mishaps
from scheduler.simulator.records import Records, Spans
from scheduler.simulator.roles import RoleController, RoleKeeper
from scheduler.simulator.seams import Policy
from scheduler.simulator.telemetry import listen
from scheduler.simulator.traffic import Traffic
from scheduler.simulator.world import World

DRAIN_S = 600.0
"""How long after the last arrival a request may still be finished; what is not by then never was."""
EVENTS_A_REPORT = 50_000


class CountsEgress:
    """What has left the remote clusters so far is written down."""

    __slots__ = ("place", "world")

    def __init__(self, world: World, place: int) -> None:
        self.world = world
        self.place = place

    def fire(self, now: float) -> None:
        """Write it down."""
        world = self.world
        world.records.egress[self.place] = sum(world.links[site.name].carried(now) for site in world.sites)


@dataclass(frozen=True, slots=True)
class Run:
    """What went in and what came of it. ``ended_at`` is when the last event fired."""

    fleet: Fleet
    settings: Settings
    traffic: Traffic
    records: Records
    ended_at: float
    events: int


def simulate(
    fleet: Fleet,
    settings: Settings,
    policy: Policy,
    traffic: Traffic,
    controller: RoleController | None = None,
    spans: Spans | None = None,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Run all of ``traffic``; ``progress`` hears now and then how many requests have come.

    Raises ValueError where the settings name a node or cluster that the fleet does not have.
    """
    records = Records(len(traffic))
    world = World(fleet, settings, policy, traffic, records, spans)
    Mishaps(world)
    listen(world)
    if controller is not None or settings.conversions:
        RoleKeeper(world, controller)
    for place, moment in enumerate(traffic.counted):
        world.clock.at(moment, CountsEgress(world, place))
    until = float(traffic.arrival_s[-1]) + DRAIN_S
    while world.clock.run(until, EVENTS_A_REPORT) and world.unfinished:
        if progress is not None:
            progress(world.arrived)
    return Run(fleet, settings, traffic, records, world.clock.now, world.clock.fired)
