"""Figures of the tiers below nodes' pools, as their heartbeats tell them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.registry import Registry
from kvcache.tiers.report import TierReport

MAX_TIERS = 8
"""Of one node: a name is there once, and a node that makes names up takes no more room than this."""
MAX_NAME_CHARS = 32

_GAUGES = (
    ("used_bytes", "bytes", "What a tier holds"),
    ("capacity_bytes", "capacity_bytes", "What a tier may hold"),
    ("entries", "entries", "Blocks and snapshots in a tier"),
    ("read_bytes_per_s", "read_bytes_per_second", "How fast a tier gives back, 0 while nothing was read"),
)
_COUNTERS = (
    ("hits", "hits", "Jobs that got back what they wanted of a prompt"),
    ("hit_tokens", "hit_tokens", "Prompt tokens that these did not compute"),
    ("spills", "spills", "Blocks and snapshots copied to a tier"),
    ("spilled_bytes", "spilled_bytes", "Their bytes"),
    ("reloads", "reloads", "Blocks and snapshots read back"),
    ("reloaded_bytes", "reloaded_bytes", "Their bytes"),
    ("drops", "drops", "Blocks and snapshots let go of for want of room"),
    ("damaged", "damaged", "Blocks and snapshots that were not what was written"),
)


class TierMetrics:
    """A collector of what joined nodes said last."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """One family for each figure, by node and tier; ``up`` is 0 for a tier that is full or failing."""
        labels = ["node", "tier"]
        up = GaugeMetricFamily("prfaas_tier_up", "Whether a tier takes and gives back what it should", labels=labels)
        gauges = [GaugeMetricFamily(f"prfaas_tier_{name}", text, labels=labels) for _, name, text in _GAUGES]
        counters = [CounterMetricFamily(f"prfaas_tier_{name}", text, labels=labels) for _, name, text in _COUNTERS]
        for node in self._registry.nodes():
            for name, tier in _by_name(() if node.heartbeat is None else node.heartbeat.tiers).items():
                where = [node.node_id, name]
                up.add_metric(where, float(not tier.state.startswith(("full", "failing"))))
                for gauge, (field, _, _) in zip(gauges, _GAUGES, strict=True):
                    gauge.add_metric(where, getattr(tier, field))
                for counter, (field, _, _) in zip(counters, _COUNTERS, strict=True):
                    counter.add_metric(where, getattr(tier, field))
        return [up, *gauges, *counters]


def _by_name(tiers: Sequence[TierReport]) -> dict[str, TierReport]:
    return {tier.name[:MAX_NAME_CHARS]: tier for tier in tiers[:MAX_TIERS]}
