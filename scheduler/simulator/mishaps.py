"""What goes wrong on purpose: links that change, nodes that are lost, ways that come too late."""

from __future__ import annotations

from scheduler.budget import FallbackBudget
from scheduler.decision import Option
from scheduler.simulator.fleet import Failure, LinkChange
from scheduler.simulator.jobs import Job
from scheduler.simulator.machine import State
from scheduler.simulator.world import World


class LinkChanges:
    """A link is slower or faster from now on."""

    __slots__ = ("change", "world")

    def __init__(self, world: World, change: LinkChange) -> None:
        self.world = world
        self.change = change

    def fire(self, now: float) -> None:
        """Change it."""
        self.world.links[self.change.cluster].becomes(self.change.bytes_per_s, now)


class NodeFails:
    """A node is gone, and all that is on it."""

    __slots__ = ("mishaps", "node")

    def __init__(self, mishaps: Mishaps, node: str) -> None:
        self.mishaps = mishaps
        self.node = node

    def fire(self, now: float) -> None:
        """Lose it."""
        self.mishaps.lose(self.node, now)


class NodeReturns:
    """A node that was lost is back, empty."""

    __slots__ = ("mishaps", "node")

    def __init__(self, mishaps: Mishaps, node: str) -> None:
        self.mishaps = mishaps
        self.node = node

    def fire(self, now: float) -> None:
        """Let it serve."""
        self.mishaps.give_back(self.node, now)


class LateCheck:
    """A remote way should have led to a first token by now; void where the request goes another way."""

    __slots__ = ("attempt", "job", "mishaps")

    def __init__(self, mishaps: Mishaps, job: Job) -> None:
        self.mishaps = mishaps
        self.job = job
        self.attempt = job.attempt

    def fire(self, now: float) -> None:
        """Give it up if it has not."""
        if self.attempt == self.job.attempt:
            self.mishaps.late(self.job, now)


class Mishaps:
    """Schedules them and picks up what they leave. One fallback a request, within the gateway's budget."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._budget = FallbackBudget()
        settings = world.settings
        if settings.late_fallback:
            world.watcher = self
        for change in settings.links:
            if change.cluster not in world.links:
                raise ValueError(
                    f"link change of {change.cluster!r}: no such cluster, there are {', '.join(world.links)}"
                )
            world.clock.at(change.at_s, LinkChanges(world, change))
        for failure in settings.failures:
            self._schedule(failure)

    def _schedule(self, failure: Failure) -> None:
        world = self._world
        if failure.node not in world.prefillers:
            raise ValueError(f"failure of {failure.node!r}: no such node, there are {', '.join(world.prefillers)}")
        world.clock.at(failure.at_s, NodeFails(self, failure.node))
        if failure.back_at_s < float("inf"):
            world.clock.at(failure.back_at_s, NodeReturns(self, failure.node))

    def dispatched(self, job: Job, option: Option, now: float) -> None:
        """Watch a remote way by the gateway's rule: late beyond max(2 x predicted, predicted + 2 s)."""
        predicted = option.predicted_ttft_s
        if job.remote and predicted is not None and not job.fell_back:
            self._world.clock.at(now + max(2 * predicted, predicted + 2.0), LateCheck(self, job))

    def late(self, job: Job, now: float) -> None:
        """Try a request again at home, unless its cache has arrived and only a slot is missing."""
        world = self._world
        if not world.unanswered(job) or not world.give_up(job, now):
            return
        self._again(job, now, frozenset((job.prefill_node,)))

    def lose(self, name: str, now: float) -> None:
        """Whatever prefilled, waited or was on its way there is tried again; what streamed from there is broken off."""
        world = self._world
        machine = world.machines.get(name)
        if machine is not None:
            machine.becomes(State.LOST, now)
            if world.roles is not None:
                world.roles.lost(name)
        else:
            world.prefillers[name].accepting = False
        world.gathering.roles_changed()
        if name in world.stores and not world.stores[name].spec.shared:
            world.stores[name].clear()
        struck = [job for job in world.under_way() if name in (job.prefill_node, job.decode_node)]
        for job in struck:
            world.give_up(job, now)
        for job in world.decoders[name].empty(now) if machine is not None else []:
            if world.unanswered(job):
                job.attempt += 1
                struck.append(job)
            else:
                world.fail(job)
        for job in struck:
            self._again(job, now, frozenset((name,)))

    def give_back(self, name: str, now: float) -> None:
        """A lost node serves again in the role that it had."""
        world = self._world
        machine = world.machines.get(name)
        if machine is not None:
            machine.takes(machine.role, now)
        else:
            world.prefillers[name].accepting = True
        world.gathering.roles_changed()
        world.resume_parked(now)

    def _again(self, job: Job, now: float, without: frozenset[str]) -> None:
        world = self._world
        if job.fell_back:
            world.fail(job)
            return
        home = sum(m.prefill.accepting for m in world.machines.values())
        cost_s = next(iter(world.machines.values())).prefill.curve.seconds(job.cached, job.stop)
        if not self._budget.admit(now, cost_s, home):
            world.fail(job)
            return
        job.fell_back = True
        world.records.fell_back += 1
        world.route(job, now, fall_back=True, without=without)
