"""What the simulated world asks of others: who decides, who watches a request, who changes roles."""

from __future__ import annotations

from typing import Protocol

from scheduler.decision import Decision, Option
from scheduler.facts import Facts
from scheduler.simulator.jobs import Job


class Policy(Protocol):
    """What the world asks: ``scheduler.policy.RoutingPolicy``, or a baseline built on it."""

    def decide(self, facts: Facts) -> Decision:
        """Where a request goes."""
        ...

    def fall_back(self, facts: Facts) -> Decision:
        """Where it goes after its first way failed."""
        ...


class Watcher(Protocol):
    """Who is told of every way that a request takes, to watch it."""

    def dispatched(self, job: Job, option: Option, now: float) -> None:
        """A request has been sent on its way."""
        ...


class Roles(Protocol):
    """Who changes the roles of machines."""

    def freed(self, name: str, now: float) -> None:
        """Something ended on a machine."""
        ...

    def lost(self, name: str) -> None:
        """A machine is gone."""
        ...
