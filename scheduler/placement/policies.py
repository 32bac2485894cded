"""Where to decode: three policies of one thought each, and the one that asks all three and takes the cheapest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler.placement.fleet import Fleet, PlacementCost, Work, cost


class Policy(StrEnum):
    """``CACHE``: where the cache is. ``DOMAIN``: the domain of the experts used most. ``SPLIT``: by expert load."""

    CACHE = "cache_first"
    DOMAIN = "expert_domain_first"
    SPLIT = "expert_load_split"
    AUTO = "auto"


SINGLE = (Policy.CACHE, Policy.DOMAIN, Policy.SPLIT)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes, by which thought, and what each policy would have had it cost."""

    chosen: PlacementCost
    by: Policy
    proposals: Mapping[Policy, PlacementCost]


def place(
    fleet: Fleet, work: Work, queues_s: Sequence[float], fleet_experts: Sequence[float], policy: Policy = Policy.AUTO
) -> Placement:
    """Choose a GPU. ``queues_s`` is what waits on each; ``fleet_experts`` tokens per expert of all traffic of late.

    Raises ValueError where ``queues_s`` is not one for each GPU, or either count of tokens not one for each expert.
    """
    if len(queues_s) != len(fleet.domain_of):
        raise ValueError(f"queues_s: {len(queues_s)} numbers for {len(fleet.domain_of)} GPUs")
    mine = fleet.domain_loads(work.experts)
    gpus = {
        Policy.CACHE: work.cached_on,
        Policy.DOMAIN: _least_busy(fleet, max(mine, key=lambda domain: mine[domain]), queues_s, work),
        Policy.SPLIT: _least_busy(fleet, _lagging(fleet, queues_s, fleet.domain_loads(fleet_experts)), queues_s, work),
    }
    proposals = {name: cost(fleet, work, gpu, queues_s[gpu], mine) for name, gpu in gpus.items()}
    by = policy
    if policy is Policy.AUTO:
        by = min(SINGLE, key=lambda name: proposals[name].seconds)
    return Placement(proposals[by], by, proposals)


def _lagging(fleet: Fleet, queues_s: Sequence[float], loads: Mapping[int, float]) -> int:
    """The domain that has the least work for its share of the expert load: in time each gets what its share is."""

    def work_for_share(domain: int) -> tuple[float, float]:
        share = loads[domain]
        waiting = sum(queues_s[gpu] for gpu in fleet.domains[domain])
        return (waiting / share if share else float("inf"), -share)

    return min(fleet.domains, key=work_for_share)


def _least_busy(fleet: Fleet, domain: int, queues_s: Sequence[float], work: Work) -> int:
    """The GPU of a domain where least waits; among equals the one that has the cache."""
    return min(fleet.domains[domain], key=lambda gpu: (queues_s[gpu], gpu != work.cached_on))
