"""The long-term controller in the simulator: the same object as the gateway's, told what a gateway would be told."""

from __future__ import annotations

from math import isnan

from scheduler.controller.actions import LongTermController, SetThreshold
from scheduler.controller.ledger import Ledger
from scheduler.controller.observation import Kind, LocalNode, Observation, Stage
from scheduler.facts import PrefillCurve
from scheduler.profiles import DecodeProfile, KvSize, PrefillProfile
from scheduler.simulator.fleet import Conversion, Fleet, Role
from scheduler.simulator.machine import Machine, State
from scheduler.simulator.traffic import Traffic
from scheduler.simulator.world import World
from scheduler.throughput import PrefillCluster, PrefillNodes


class LongTerm:
    """A ``RoleController`` that asks ``controller`` ``every_s`` seconds and does what it says."""

    def __init__(self, controller: LongTermController, fleet: Fleet, traffic: Traffic, every_s: float = 10.0) -> None:
        self.every_s = every_s
        self._controller = controller
        self._traffic = traffic
        self._kinds = tuple(
            Kind(kind.name, profile_of(kind.name, kind.curve), DecodeProfile(len(kind.step_s) - 1, kind.step_s[-1]))
            for kind in fleet.local
        )
        self._step_s = {kind.name: kind.step_s[-1] for kind in fleet.local}
        self._kv = KvSize(fleet.sizes.state, fleet.sizes.per_token, fleet.sizes.windows)
        self._ledger = Ledger()
        self._seen = 0
        self._open: dict[int, int] = {}
        """Requests that have come and are not done, with the tokens that were counted of each."""

    def look(self, world: World, now: float) -> list[Conversion]:
        """Tell the controller what came since the last look; its threshold is in force at once."""
        lengths = self._count(world, now)
        machines = world.machines.values()
        seen = Observation(
            nodes=tuple(self._node(machine, now) for machine in machines if machine.state is not State.LOST),
            kinds=self._kinds,
            clusters=tuple(
                PrefillCluster(
                    site.name,
                    tuple(PrefillNodes(1, profile_of(n.name, n.curve)) for n in site.nodes if n.accepting),
                    site.link.facts(now).bytes_per_s or 0.0,
                )
                for site in world.sites
                if any(n.accepting for n in site.nodes)
            ),
            kv=self._kv,
            threshold=float(world.gathering.threshold_tokens),
            lengths=lengths,
            spoken=self._ledger.take(),
            waiting_prefill=sum(node.waiting for node in world.prefillers.values()),
            waiting_decode=sum(machine.decode.waiting for machine in machines),
        )
        wanted = []
        for action in self._controller.step(seen, now):
            if isinstance(action, SetThreshold):
                world.gathering.threshold_tokens = round(action.tokens)
            else:
                wanted.append(Conversion(now, action.node_id, Role(action.stage.value)))
        return wanted

    def _count(self, world: World, now: float) -> tuple[int, ...]:
        """Uncached lengths of what came, and the ledger of what was spoken."""
        records, prompts = world.records, self._traffic.prompt_tokens
        came = range(self._seen, world.arrived)
        self._seen = world.arrived
        self._open.update(dict.fromkeys(came, -1))
        cached_matters = bool(self._traffic.blocks)
        lengths = [] if cached_matters else [int(prompts[index]) - 1 for index in came]
        for index, counted in list(self._open.items()):
            first_at = records.first_at[index]
            if isnan(first_at):
                continue
            if counted < 0:
                counted = 0
                if cached_matters:  # what was cached is known once it has been prefilled
                    lengths.append(int(prompts[index]) - 1 - records.cached_tokens[index])
            output = int(self._traffic.output_tokens[index])
            ended = not isnan(records.done_at[index])
            spoken = output if ended else min(output - 1, int((now - first_at) / self._pace_s) + 1)
            self._ledger.spoke(index, max(0, spoken - counted), first_at)
            self._open[index] = max(spoken, counted)
            if ended:
                self._ledger.ended(index)
                del self._open[index]
        return tuple(lengths)

    @property
    def _pace_s(self) -> float:
        """Seconds a token, of a full batch: what a stream is told to have spoken between two looks is made of it."""
        return max(self._step_s.values())

    @staticmethod
    def _node(machine: Machine, now: float) -> LocalNode:
        stage = Stage(machine.role.value)
        prefills = stage is Stage.PREFILL
        return LocalNode(
            node_id=machine.name,
            kind=machine.name.rsplit("-", 1)[0],
            stage=stage,
            becoming=None if machine.state is State.SERVING else stage.other,
            work=machine.prefill.queued_s(now) if prefills else float(machine.decode.assigned),
            busy=float(machine.prefill.running is not None)
            if prefills
            else machine.decode.active / machine.decode.batch,
        )


def profile_of(name: str, curve: PrefillCurve) -> PrefillProfile:
    """A decision's curve, per token, as a planning profile, per thousand tokens."""
    return PrefillProfile(name, curve.fixed_s, curve.token_s * 1e3, curve.square_s * 1e6)
