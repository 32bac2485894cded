"""Figures of admission: who waits, who came in and how, who was refused and why, and how long waiting took."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.plain_metrics import Counter, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)


class AdmissionMetrics:
    """Counters that requests update, in a registry that is read as one collector; queue lengths are read then."""

    def __init__(self, waiting: Callable[[], tuple[int, int, int]]) -> None:
        """``waiting`` tells requests, tokens and accounts in the queue."""
        self._waiting = waiting
        own = self._own = CollectorRegistry()
        self.admitted = Counter(
            "prfaas_admitted", "Requests sent to nodes, at once or from the queue", ["how"], registry=own
        )
        self.refused = Counter("prfaas_refused", "Requests refused by admission", ["reason"], registry=own)
        self.queue_s = Histogram(
            "prfaas_request_queue_time_seconds",
            "Waiting at the gateway, of all that waited",
            registry=own,
            buckets=_SECONDS,
        )

    def collect(self) -> Iterable[Metric]:
        """What there is now."""
        requests, tokens, accounts = self._waiting()
        yield GaugeMetricFamily("prfaas_num_requests_waiting", "Requests in the gateway's queue", value=requests)
        yield GaugeMetricFamily("prfaas_queue_tokens", "Prompt tokens in the gateway's queue", value=tokens)
        yield GaugeMetricFamily("prfaas_queue_accounts", "Tenants that wait in it", value=accounts)
        yield from self._own.collect()
