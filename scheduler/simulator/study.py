"""What a policy's name stands for: a fleet, a split, a threshold, and who decides. All get the same order and traffic.

Whatever is not given is what the throughput model finds best for this fleet and these lengths, in its true reading.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, floor, inf

from scheduler.lengths import LengthDistribution
from scheduler.observed_lengths import LengthHistogram
from scheduler.policy import RoutingPolicy
from scheduler.simulator.baselines import Static
from scheduler.simulator.figures import Goals
from scheduler.simulator.fleet import LOCAL, Fleet, LocalMachines, Settings
from scheduler.simulator.orders import FIRST_COME, Ordering
from scheduler.simulator.prefixes import StoreSpec
from scheduler.simulator.presets import deployment_of
from scheduler.simulator.roles import RoleController
from scheduler.simulator.seams import Policy
from scheduler.simulator.time_share import TimeShare
from scheduler.simulator.traffic import Traffic
from scheduler.split_search import SplitSearch
from scheduler.throughput import Reading
from scheduler.values import PolicyValues

ENDLESS_S = 1e18
BEYOND_ALL = 1 << 40
"""A threshold that no prompt is above."""


class Name(StrEnum):
    """PRFAAS: the routing policy. HOMOGENEOUS: no remote cluster, as many machines at home. NAIVE: all prompts away.

    STATIC: a fixed threshold. LOCAL: the remote cluster unused. DISTSERVE: all machines in one cluster over uniform
    RDMA, whoever is free first. SPLITWISE: both phases on one machine, prompts between steps. MOONCAKE: as DistServe,
    over a store of prefixes that all share.
    """

    PRFAAS = "prfaas"
    HOMOGENEOUS = "homogeneous"
    NAIVE = "naive"
    STATIC = "static"
    LOCAL = "local"
    DISTSERVE = "distserve"
    SPLITWISE = "splitwise"
    MOONCAKE = "mooncake"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user may say. ``prefill``, ``threshold_tokens`` None: the model's best.

    ``fractional``: the roles are shared over time, a conversion taking ``conversion_s``, or, with a ``tpot_budget`` > 0
    of time per output token, by prefilling beside streams.
    """

    name: Name
    prefill: int | None = None
    threshold_tokens: int | None = None
    ordering: Ordering = FIRST_COME
    fractional: bool = False
    conversion_s: float = 30.0
    tpot_budget: float = 0.0
    late_fallback: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    fleet: Fleet
    settings: Settings
    policy: Policy
    controller: RoleController | None
    goals: Goals


def plan(
    choice: Choice,
    hybrid: Fleet,
    homogeneous: Fleet,
    lengths: LengthDistribution,
    output_tokens: float,
    goals: Goals,
    values: PolicyValues,
) -> Plan:
    """Make a plan for a fleet with a remote cluster and the one of equal cost without."""
    fleet = {
        Name.HOMOGENEOUS: homogeneous,
        Name.SPLITWISE: homogeneous,
        Name.LOCAL: hybrid,
        Name.DISTSERVE: _one_cluster(hybrid),
        Name.MOONCAKE: _one_cluster(hybrid),
    }.get(choice.name, hybrid)
    at_home = choice.name in (Name.LOCAL, Name.HOMOGENEOUS, Name.SPLITWISE)
    planned = replace(fleet, clusters=()) if at_home else hybrid
    search = SplitSearch(deployment_of(planned, output_tokens), lengths, Reading.MEAN_SERVICE)
    chunk_s, controller = 0.0, None
    routing = RoutingPolicy(values)
    policy: Policy = routing
    best = search.fractional() if choice.fractional else search.split()
    prefill, threshold = best.n_p, best.demand.t
    if choice.name is Name.NAIVE:
        prefill, threshold, policy = 0, -1, Static(routing, -1)
    elif choice.name is Name.SPLITWISE:
        # each machine's time is divided as the best whole split divides the machines
        chunk_s = goals.tpot_s * prefill / best.n_d
        prefill = 0
    if choice.prefill is not None and not choice.fractional:
        prefill = choice.prefill
        if choice.name in (Name.PRFAAS, Name.STATIC):
            threshold = search.threshold([prefill]).demand.t
    if choice.threshold_tokens is not None:
        threshold = choice.threshold_tokens
    if choice.name is Name.STATIC:
        policy = Static(routing, threshold)
    elif at_home:
        policy, threshold = Static(routing, inf), BEYOND_ALL
    least = floor(prefill + 1e-9)
    if choice.fractional and choice.tpot_budget > 0:
        chunk_s = goals.tpot_s * choice.tpot_budget
    elif choice.fractional and least < prefill:
        controller = TimeShare(least, ceil(prefill))
        least = ceil(prefill)
    settings = Settings(
        round(min(max(threshold, 0), BEYOND_ALL)),
        choice.ordering,
        conversion_s=choice.conversion_s,
        chunk_s=chunk_s,
        late_fallback=choice.late_fallback,
    )
    return Plan(_prefilling(fleet, least), settings, policy, controller, goals)


def with_store(made: Plan, name: Name, spec: StoreSpec | None) -> Plan:
    """The same with prefixes kept; DistServe's nodes each keep their own, Mooncake's share, whatever is asked."""
    if spec is not None and name in (Name.DISTSERVE, Name.MOONCAKE):
        spec = replace(spec, shared=name is Name.MOONCAKE)
    return replace(made, fleet=replace(made.fleet, store=spec))


def lengths_of(traffic: Traffic) -> LengthDistribution:
    """The uncached lengths of a trace, as an endless cache that all share would leave them."""
    histogram = LengthHistogram(ENDLESS_S)
    for tokens in traffic.uncached_tokens().tolist():
        if tokens > 0:
            histogram.add(tokens, 0.0)
    found = histogram.snapshot()
    if found is None:
        raise ValueError("traffic: no prompt leaves anything to prefill")
    return found


def _one_cluster(fleet: Fleet) -> Fleet:
    """All machines at home; those that were remote only prefill, for nothing is known of their decoding."""
    step_s = fleet.local[0].step_s
    moved = tuple(LocalMachines(c.name, c.count, c.count, c.curve, step_s) for c in fleet.clusters)
    return replace(fleet, local=(*fleet.local, *moved), clusters=())


def _prefilling(fleet: Fleet, count: int) -> Fleet:
    """With ``count`` machines of the first kind that prefill."""
    first, *others = fleet.local
    if not 0 <= count <= first.count - (0 if any(kind.prefill < kind.count for kind in others) else 1):
        raise ValueError(f"prefill must leave a {LOCAL} machine to decode: 0 to {first.count - 1}, got {count}")
    return replace(fleet, local=(replace(first, prefill=count), *others))
