"""Figures of what gateways share: whether Redis answers, who there is, what was lost."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.shared.together import Together


class SharedFigures:
    """Read at scrape time."""

    def __init__(self, together: Together) -> None:
        self._together = together

    def collect(self) -> Iterable[Metric]:
        """The families of now."""
        shared = self._together
        for name, text, value in (
            ("prfaas_redis_up", "Whether Redis answered the last call", shared.link.up),
            ("prfaas_gateway_leads", "Whether this gateway runs the long-term loop", shared.leadership.leads),
            ("prfaas_gateways", "Gateways that share this state, as far as known", shared.gateways),
            ("prfaas_limits_even_share", "Whether limits are an even share, undivided", shared.slices.degraded),
            ("prfaas_clock_ahead_seconds", "How far the clock here is ahead of Redis's", shared.clock_ahead_s),
            ("prfaas_limit_slices", "Keys and tenants that have slices of their limits here", len(shared.slices)),
        ):
            gauge = GaugeMetricFamily(name, text)
            gauge.add_metric([], float(value))
            yield gauge
        lost = shared.records.lost + shared.audit.lost
        for name, text, count in (
            ("prfaas_redis_calls_failed", "Calls that Redis did not answer", shared.link.failed),
            ("prfaas_shared_records_lost", "Records that other gateways do not see", lost),
        ):
            counter = CounterMetricFamily(name, text)
            counter.add_metric([], count)
            yield counter
