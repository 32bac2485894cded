"""A link that flows share: each gets what it can use, at most its fair part of what is left (max-min fairness).

Most of the time nothing fills a link: while the steepest releases of all its flows together fit, each flow has left the
moment its prefill ends, and the link costs no events. Only when they do not fit is it followed from bend to bend.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from scheduler.simulator.clock import Clock
from scheduler.simulator.flows import Flow

NOTHING_BYTES = 16.0
"""A backlog below this is rounding."""
LEAST_STEP_S = 1e-9


class LinkTick:
    """Some flow's rate changes; void once another tick was scheduled."""

    __slots__ = ("link", "tick")

    def __init__(self, link: Link, tick: int) -> None:
        self.link = link
        self.tick = tick

    def fire(self, now: float) -> None:
        """Look again."""
        if self.tick == self.link.tick:
            self.link.look(now)


class Link:
    """``rate`` bytes per second, shared by the open flows; ``done`` is called with a flow when its last byte has left.

    ``carried`` counts what has left in all, as of the end of each flow.
    """

    def __init__(self, name: str, rate: float, rtt_s: float, clock: Clock, done: Callable[[Flow, float], None]) -> None:
        self.name = name
        self.rate = rate
        self.rtt_s = rtt_s
        self.tick = 0
        self.flows: list[Flow] = []
        self.busy = False
        self._gone = 0.0
        self._clock = clock
        self._done = done
        self._looked_at = 0.0

    def carried(self, now: float) -> float:
        """Bytes that have left up to now, in all."""
        if self.busy:
            since = now - self._looked_at
            return self._gone + sum(flow.sent + flow.rate * since for flow in self.flows)
        return self._gone + sum(flow.released(now) for flow in self.flows)

    def backlog(self, now: float) -> float:
        """Bytes that have been let go and have not left."""
        if not self.busy:
            return 0.0
        since = now - self._looked_at
        return sum(max(0.0, flow.released(now) - flow.sent - flow.rate * since) for flow in self.flows)

    def open(self, flow: Flow, now: float) -> None:
        """A transfer begins."""
        if self.busy:
            self._advance(now)
        self.flows.append(flow)
        self._settle(now)

    def computed(self, flow: Flow, now: float) -> None:
        """All of a flow has been let go: on a link that nothing fills it has left as well."""
        if not self.busy:
            self.flows.remove(flow)
            self._gone += flow.total
            self._done(flow, now)
        else:
            self.look(now)

    def close(self, flow: Flow, now: float) -> None:
        """A transfer is given up; what it sent stays sent."""
        if flow in self.flows:
            if self.busy:
                self._advance(now)
            else:
                flow.sent = flow.released(now)
            self._gone += flow.sent
            self.flows.remove(flow)
            self._settle(now)

    def changed(self, now: float) -> None:
        """A flow rests or goes on."""
        if self.busy:
            self.look(now)

    def becomes(self, rate: float, now: float) -> None:
        """The link is slower or faster from now on."""
        if self.busy:
            self._advance(now)
        self.rate = rate
        self._settle(now)

    def look(self, now: float) -> None:
        """Bring everything up to now, let go what has left, and share anew."""
        if not self.busy:
            self._settle(now)
            return
        self._advance(now)
        left = [f for f in self.flows if f.complete and now >= f.ends_at and f.total - f.sent <= NOTHING_BYTES]
        if left:
            self.flows = [flow for flow in self.flows if flow not in left]
            self._gone += sum(flow.total for flow in left)
        self._settle(now)
        for flow in left:
            self._done(flow, now)

    def _settle(self, now: float) -> None:
        """Choose how to follow the flows from now on."""
        flows, rate = self.flows, self.rate
        peaks = 0.0
        for flow in flows:
            peaks += flow.peak
        if not self.busy and peaks <= rate:
            return
        if not self.busy:
            for flow in flows:
                flow.sent = flow.released(now) if flow.began < now else 0.0
        kept_up = all(f.slope(now) <= f.cap and f.released(now) - f.sent <= NOTHING_BYTES for f in flows)
        if kept_up and sum([flow.slope(now) for flow in flows]) <= rate:
            self.busy = False
            self.tick += 1
            bend = min([flow.bends_at(now) for flow in flows], default=inf)
            if peaks > rate and bend < inf:
                self._clock.at(bend, LinkTick(self, self.tick))
            return
        self.busy = True
        self._looked_at = now
        self._share(now)

    def _advance(self, now: float) -> None:
        since = now - self._looked_at
        if since > 0:
            for flow in self.flows:
                flow.sent = min(flow.sent + flow.rate * since, flow.released(now))
            self._looked_at = now

    def _share(self, now: float) -> None:
        """Give every flow its rate, the least demanding first, and look again when one of them changes."""
        demands = []
        for flow in self.flows:
            waits = flow.released(now) - flow.sent > NOTHING_BYTES
            demands.append((flow.cap if waits else min(flow.cap, flow.slope(now)), flow))
        demands.sort(key=lambda entry: entry[0])
        left, count = self.rate, len(demands)
        for demand, flow in demands:
            flow.rate = min(demand, left / count)
            left -= flow.rate
            count -= 1
        following = min((self._changes_at(flow, now) for flow in self.flows), default=inf)
        self.tick += 1
        if following < inf:
            self._clock.at(max(following, now + LEAST_STEP_S), LinkTick(self, self.tick))

    def _changes_at(self, flow: Flow, now: float) -> float:
        """When a flow's demand changes: at a bend of its curve, or when its backlog is gone."""
        backlog, slope = flow.released(now) - flow.sent, flow.slope(now)
        bend = flow.bends_at(now)
        if backlog > NOTHING_BYTES and flow.rate > slope:
            return min(bend, now + backlog / (flow.rate - slope))
        return bend
