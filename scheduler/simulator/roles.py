"""Machines that change their role: who asks for it, and draining, converting, serving again.

A machine that drains finishes what has begun. What has not, because its prompt still waits to be prefilled there, or
elsewhere for a machine that leaves decode, is decided anew. Then the machine converts, for as long as the settings say.
"""

from __future__ import annotations

from typing import Protocol

from scheduler.simulator.fleet import Conversion, Role
from scheduler.simulator.machine import Machine, State
from scheduler.simulator.records import Converted
from scheduler.simulator.world import World


class RoleController(Protocol):
    """Who decides on role changes. ``every_s`` is how often it is asked."""

    @property
    def every_s(self) -> float:
        """Seconds between two looks."""
        ...

    def look(self, world: World, now: float) -> list[Conversion]:
        """The conversions that should begin now; most of the time none."""
        ...


class ConversionBegins:
    """A role change that was written down beforehand."""

    __slots__ = ("conversion", "keeper")

    def __init__(self, keeper: RoleKeeper, conversion: Conversion) -> None:
        self.keeper = keeper
        self.conversion = conversion

    def fire(self, now: float) -> None:
        """Ask for it."""
        self.keeper.convert(self.conversion.node, self.conversion.to, now)


class ConversionEnds:
    """A machine is ready in its new role; void where something else became of it meanwhile."""

    __slots__ = ("changes", "keeper", "machine", "record")

    def __init__(self, keeper: RoleKeeper, machine: Machine, record: Converted) -> None:
        self.keeper = keeper
        self.machine = machine
        self.record = record
        self.changes = machine.changes

    def fire(self, now: float) -> None:
        """Let it serve."""
        if self.changes == self.machine.changes:
            self.keeper.converted(self.machine, self.record, now)


class ControllerLooks:
    """The controller is asked, and will be again."""

    __slots__ = ("keeper",)

    def __init__(self, keeper: RoleKeeper) -> None:
        self.keeper = keeper

    def fire(self, now: float) -> None:
        """Ask it."""
        self.keeper.ask(now)


class RoleKeeper:
    """Carries role changes out. One machine may be asked while it changes already: that is refused."""

    def __init__(self, world: World, controller: RoleController | None) -> None:
        self._world = world
        self._controller = controller
        self._leaving: dict[str, Converted] = {}
        world.roles = self
        for conversion in world.settings.conversions:
            if conversion.node not in world.machines:
                known = ", ".join(world.machines)
                raise ValueError(f"conversion of {conversion.node!r}: no such local machine, there are {known}")
            world.clock.at(conversion.at_s, ConversionBegins(self, conversion))
        if controller is not None:
            world.clock.at(controller.every_s, ControllerLooks(self))

    @property
    def changing(self) -> int:
        """Machines that are on their way from one role to the other."""
        return len(self._leaving)

    def convert(self, name: str, to: Role, now: float) -> bool:
        """Begin a role change. False where the machine has that role, is not serving, or is the last of its role."""
        machine = self._world.machines[name]
        others = [m for m in self._world.machines.values() if m.role is machine.role and m.state is State.SERVING]
        if machine.role is to or machine.state is not State.SERVING or (to is Role.PREFILL and len(others) < 2):
            return False
        machine.becomes(State.DRAINING, now)
        self._leaving[name] = Converted(name, to.value, now)
        self._world.records.conversions.append(self._leaving[name])
        self._world.gathering.roles_changed()
        if machine.role is Role.PREFILL:
            unbegun = machine.prefill.shed(lambda job: True, now)
        else:
            nodes = self._world.prefillers.values()
            unbegun = [job for node in nodes for job in node.shed(lambda job: job.decode_node == name, now)]
        for job in sorted(unbegun, key=lambda job: job.index):
            self._world.undo(job)
            self._world.route(job, now)
        self.freed(name, now)
        return True

    def freed(self, name: str, now: float) -> None:
        """Something ended on a machine; one that drains may be empty now."""
        record = self._leaving.get(name)
        if record is None:
            return
        machine = self._world.machines[name]
        if machine.state is State.DRAINING and machine.drained:
            record.drained_at = now
            machine.becomes(State.CONVERTING, now)
            if name in self._world.stores and not self._world.stores[name].spec.shared:
                self._world.stores[name].clear()
            self._world.clock.at(now + self._world.settings.conversion_s, ConversionEnds(self, machine, record))

    def converted(self, machine: Machine, record: Converted, now: float) -> None:
        """A machine serves in its new role."""
        record.served_at = now
        del self._leaving[machine.name]
        machine.takes(Role(record.to), now)
        self._world.gathering.roles_changed()
        self._world.resume_parked(now)

    def lost(self, name: str) -> None:
        """A machine is gone, in whatever state it was."""
        self._leaving.pop(name, None)

    def ask(self, now: float) -> None:
        """Let the controller look, do what it says, and come back while there is traffic."""
        assert self._controller is not None
        for conversion in self._controller.look(self._world, now):
            self.convert(conversion.node, conversion.to, now)
        if self._world.unfinished:
            self._world.clock.at(now + self._controller.every_s, ControllerLooks(self))
