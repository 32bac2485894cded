"""What nodes tell of their links each second, as the gateway hears it: the same estimator learns from it.

A node sees what its connections delivered, and whether they were the limit: that is where bytes waited all the time. A
link on which nothing waits is measured by probes when the estimator asks for them; a probe sees the rate of an idle
link. Where no link ever changes there is little to learn, and less is said.
"""

from __future__ import annotations

from math import inf

from scheduler.links import LinkState, PathReport
from scheduler.simulator.links import NOTHING_BYTES, Link
from scheduler.simulator.world import World

BEAT_S = 1.0
CALM_BEAT_S = 30.0
"""Between two reports of a link that never changes; it must stay below what an estimate is called fresh for."""


class Beat:
    """One cluster's nodes report; the next report is scheduled while there is traffic."""

    __slots__ = ("_carried", "_every_s", "_link", "_probe_bytes", "_stalled_s", "_state", "_waited", "_world")

    def __init__(self, world: World, link: Link, state: LinkState, every_s: float) -> None:
        self._world = world
        self._link = link
        self._state = state
        self._every_s = every_s
        self._carried = 0.0
        self._waited = False
        self._stalled_s = 0.0
        self._probe_bytes = 0

    def fire(self, now: float) -> None:
        """Report, and probe if that is due."""
        link, state = self._link, self._state
        carried, waits = link.carried(now), link.backlog(now) > NOTHING_BYTES
        at_least = (carried - self._carried) / self._every_s
        limited = waits and self._waited
        self._stalled_s = self._stalled_s + self._every_s if limited and carried == self._carried else 0.0
        probe = 0 if waits else state.probe_due(now)
        if probe and link.rate > 0:
            state.probed(probe, now)
            self._probe_bytes += probe
        told = link.rate if probe else at_least
        report = PathReport(
            rtt_s=link.rtt_s,
            least_rtt_s=link.rtt_s,
            acked_bytes=int(carried) + self._probe_bytes,
            probe_bytes=self._probe_bytes,
            at_least=told,
            at_most=told if probe or limited else 0.0,
            stalled_s=self._stalled_s,
        )
        state.reported(link.name, {"home": report}, now)
        self._carried, self._waited = carried, waits
        if self._world.unfinished:
            self._world.clock.at(now + self._every_s, self)


def listen(world: World) -> None:
    """Let every remote cluster report from now on; what a link does when it is set up is known."""
    every_s = BEAT_S if world.settings.links else CALM_BEAT_S
    for site in world.sites:
        link = world.links[site.name]
        if link.rate < inf:
            site.link.reported(link.name, {"home": PathReport(link.rtt_s, at_least=link.rate, at_most=link.rate)}, 0.0)
        world.clock.at(every_s, Beat(world, link, site.link, every_s))
