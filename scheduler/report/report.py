"""The rebalancing report as one value: everything that is known of a window, and sentences for what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler.controller.observation import Observation
from scheduler.controller.proposals import Proposal
from scheduler.controller.settings import ControllerSettings
from scheduler.profiles import PrefillProfile
from scheduler.report.capacity import CapacityView, capacity_view
from scheduler.report.conversions import ConversionEffect, Converted, effects
from scheduler.report.egress import Egress, Site, egress
from scheduler.report.latency import Attainment, Goals, Latency, attainment, latency
from scheduler.report.requests import Served, Window
from scheduler.report.traffic import TrafficProfile, traffic_profile

LEAST_REQUESTS = 8
READING = (
    "Capacities are the throughput model's in its mean_service reading: a stage is full at N / E[T], beyond which its "
    "queue grows without bound. The model has no queueing, so waiting begins well below. The point reading, N / "
    "T(E[L]), stands beside it because published figures use it; it is never lower."
)
ANSWERS = (
    "Mean answer length is that of the answers that ended in the window; one that grew longer of late shows with delay."
)


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """All that a report is made of; times are Unix seconds.

    ``requests`` are those kept of [``since``, ``until``), in any order; ``since`` None begins with the first of them.
    ``truncated``: older ones of that time were not kept. ``seen`` is the newest look at the fleet, None before the
    first. ``seed`` is for the draws.
    """

    requests: Sequence[Served]
    until: float
    settings: ControllerSettings
    since: float | None = None
    truncated: bool = False
    seen: Observation | None = None
    sites: Sequence[Site] = ()
    conversions: Sequence[Converted] = ()
    proposals: Sequence[Proposal] = ()
    goals: Goals = field(default_factory=Goals)
    seed: int = 0


class Report(msgspec.Struct, frozen=True):
    """What ``prfaas report rebalancing`` prints. A part that is None is explained in ``unknown``."""

    made_at: float
    window: Window
    mode: str
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    traffic: TrafficProfile | None
    capacity: CapacityView | None
    latency: Latency | None
    slo: Attainment | None
    egress: Egress
    conversions: tuple[ConversionEffect, ...]
    proposals: tuple[Proposal, ...]


def make_report(given: ReportInputs) -> Report:
    """Work everything out. The same inputs give the same report."""
    requests = sorted(given.requests, key=lambda one: one.at)
    first = requests[0].at if requests else given.until
    since = first if given.since is None or given.truncated else given.since
    window = Window(since, max(given.until, since), len(requests))
    unknown, notes = [], [READING, ANSWERS]
    if given.truncated:
        notes.append("Older requests of the time asked for are not kept; the window begins where they do.")
    enough = len(requests) >= LEAST_REQUESTS and window.seconds > 0
    if not enough:
        unknown.append(
            f"{len(requests)} requests came in the window. Below {LEAST_REQUESTS} nothing is said of traffic, latency "
            "and capacity."
        )
    capacity: CapacityView | None = None
    if given.seen is None:
        unknown.append("No local node has shown yet how fast it prefills and decodes, so its capacity is not known.")
    elif enough:
        rate = len(requests) / window.seconds
        looked = capacity_view(given.seen, requests, rate, given.settings, given.seed)
        if isinstance(looked, str):
            unknown.append(looked)
        else:
            capacity = looked
    slo = attainment(requests, _kinds(given.seen), given.goals) if enough else None
    if slo is not None and slo.ttft is None:
        unknown.append("TTFT is not held against its goal: no prefill node has shown how fast it is.")
    if slo is not None and slo.tpot is None:
        unknown.append("Time per output token is not held against a goal, as none was stated (--tpot-goal-ms).")
    return Report(
        made_at=given.until,
        window=window,
        mode=given.settings.mode.value,
        unknown=tuple(unknown),
        notes=tuple(notes),
        traffic=traffic_profile(requests, window) if enough else None,
        capacity=capacity,
        latency=latency(requests, window) if enough else None,
        slo=slo,
        egress=egress(requests, given.sites, window),
        conversions=effects(given.conversions, requests, window.since, window.until),
        proposals=tuple(given.proposals),
    )


def _kinds(seen: Observation | None) -> list[PrefillProfile]:
    """Every kind of node that prefills anywhere."""
    if seen is None:
        return []
    remote = [nodes.prefill for cluster in seen.clusters for nodes in cluster.nodes]
    return [*(kind.prefill for kind in seen.kinds), *remote]
