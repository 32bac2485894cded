"""Gauges of the long-term loop: what HPA and KEDA scale by, and how the present split does."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.rebalancing import Rebalancing


class RebalanceGauges:
    """Read at scrape time; nothing is shown before the first look."""

    def __init__(self, rebalancing: Rebalancing) -> None:
        self._rebalancing = rebalancing

    def collect(self) -> Iterable[Metric]:
        """The families of now."""
        desired = GaugeMetricFamily(
            "prfaas_desired_replicas", "Nodes that would carry the offered load", labels=["stage"]
        )
        capacity = GaugeMetricFamily("prfaas_capacity_requests_per_second", "Lambda_max", labels=["split"])
        others = (
            ("prfaas_offered_requests_per_second", "Requests that come", "rate"),
            ("prfaas_capacity_load", "Offered rate over the capacity of the present split", "load"),
            ("prfaas_split_gain", "Capacity of the best split over that of the present one", "gain"),
            ("prfaas_believed_output_tokens", "Mean answer, as believed", "output_tokens"),
        )
        gauges = [GaugeMetricFamily(name, text) for name, text, _ in others]
        look = self._rebalancing.assessment
        if look is not None:
            desired.add_metric(["prefill"], look.desired_prefill)
            desired.add_metric(["decode"], look.desired_decode)
            capacity.add_metric(["present"], look.lambda_now)
            capacity.add_metric(["best"], look.lambda_best)
            for gauge, (_, _, field) in zip(gauges, others, strict=True):
                value = getattr(look, field)
                if isfinite(value):
                    gauge.add_metric([], value)
        ended = CounterMetricFamily("prfaas_conversions", "Role conversions that ended", labels=["outcome"])
        for phase, count in self._rebalancing.conversions.counts.items():
            ended.add_metric([phase.value], count)
        return [desired, capacity, *gauges, ended]
