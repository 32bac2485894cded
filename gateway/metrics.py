"""Prometheus metrics of one gateway, in a registry of its own, under names that operators know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.kv_index import KvIndex
from gateway.plain_metrics import Counter, Gauge, Histogram
from gateway.registry import Registry
from gateway.tier_metrics import TierMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STAGES = frozenset({"queue", "prefill", "transfer", "load", "decode", "node", "wait"})
CAUSES = frozenset(
    {"node_lost", "late", "engine_lost", "deadline", "protocol", "queue_full", "peer_lost", "cancelled_by_node"}
    | {"slow_client", "pool_full", "prefix_gone", "digest_mismatch", "ticket", "shutting_down"}
)
_LINK_GAUGES = (
    ("prfaas_link_bytes_per_second", "Learnt rate of a way, 0 for one on which nothing moves"),
    ("prfaas_link_rtt_seconds", "Round trip of a way"),
    ("prfaas_link_queueing_seconds", "What its round trip has above its least"),
    ("prfaas_link_loss", "Share of its bytes that were sent again"),
    ("prfaas_link_utilisation", "Share of its rate in use"),
    ("prfaas_link_congested", "Whether it is congested"),
)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters that request handling updates; what the registry knows is read at scrape time."""

    def __init__(self, registry: Registry, kv_index: KvIndex) -> None:
        self.together: Callable[[], Awaitable[bytes]] | None = None
        """Where several processes are one gateway: the text exposition of all of them."""
        own = self._own = CollectorRegistry()
        self.requests = Counter("prfaas_requests", "Requests answered", ["endpoint", "route", "status"], registry=own)
        self.duration = Histogram(
            "prfaas_request_duration_seconds",
            "From arrival to the last byte",
            ["endpoint"],
            registry=own,
            buckets=_SECONDS,
        )
        self.ttft = Histogram(
            "prfaas_time_to_first_token_seconds",
            "From arrival to the first token",
            ["route"],
            registry=own,
            buckets=_SECONDS,
        )
        self.gap = Histogram(
            "prfaas_inter_token_latency_seconds", "Between deltas of one answer", registry=own, buckets=_FAST
        )
        self.running = Gauge("prfaas_num_requests_running", "Requests being served", registry=own)
        self.prompt_tokens = Counter("prfaas_prompt_tokens", "Prompt tokens of answered requests", registry=own)
        self.generation_tokens = Counter("prfaas_generation_tokens", "Tokens generated", registry=own)
        self.decisions = Counter(
            "prfaas_disagg_decision", "Routing decisions", ["decision_type", "reason"], registry=own
        )
        self.failures = Counter(
            "prfaas_attempt_failures",
            "Attempts that failed before or after the first token",
            ["stage", "cause"],
            registry=own,
        )
        self.fallbacks = Counter("prfaas_fallbacks", "Requests whose first attempt failed", ["outcome"], registry=own)
        self.retries = Counter(
            "prfaas_retries",
            "Tries after one that failed, but for fallbacks",
            ["way"],
            registry=own,
        )
        self.in_place = Counter("prfaas_in_place_prefills", "Prompts prefilled on the decode node", registry=own)
        self.moves = Counter("prfaas_prefix_moves", "Prefixes sent ahead to a prefill node", ["outcome"], registry=own)
        self.moved_bytes = Counter("prfaas_prefix_move_bytes", "Bytes on the wire of moved prefixes", registry=own)
        self.kv_bytes = Counter("prfaas_pd_kv_transfer_bytes", "KV bytes committed", ["cluster", "form"], registry=own)
        self.kv_seconds = Histogram(
            "prfaas_pd_kv_transfer_seconds", "Whole transfers", ["cluster"], registry=own, buckets=_SECONDS
        )
        self.kv_exposed = Histogram(
            "prfaas_pd_kv_transfer_exposed_seconds",
            "Transfer time after the last chunk",
            ["cluster"],
            registry=own,
            buckets=_SECONDS,
        )
        self.cancel = Histogram(
            "prfaas_cancel_seconds", "From a cancel to the node's word that it is done", registry=own, buckets=_SECONDS
        )
        self.usage_differs = Counter(
            "prfaas_usage_differs", "Answers whose engine counted other prompt tokens than the gateway", registry=own
        )
        self.cached_tokens = Counter("prfaas_cached_tokens", "Prompt tokens that needed no prefill", registry=own)
        own.register(_Fleet(registry))
        own.register(TierMetrics(registry))
        own.register(_PrefixIndex(kv_index))

    def show(self, collector: Collector) -> None:
        """Have another collector read at every scrape."""
        self._own.register(collector)

    def failed(self, stage: str, cause: str) -> None:
        """Count a failed attempt; words that nodes made up share one label."""
        self.failures.labels(stage if stage in STAGES else "other", cause if cause in CAUSES else "other").inc()

    async def exposition(self) -> bytes:
        """What ``/metrics`` answers."""
        return self.render() if self.together is None else await self.together()

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._own)


class _Fleet:
    """Gauges of joined nodes and clusters, as of now."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        now = asyncio.get_running_loop().time()
        nodes = GaugeMetricFamily("prfaas_nodes", "Joined nodes", labels=["cluster", "role", "accepting"])
        usage = GaugeMetricFamily("prfaas_kv_cache_usage_perc", "Host pool in use, 0 to 1", labels=["node"])
        queued = GaugeMetricFamily("prfaas_node_queued_tokens", "Prompt tokens waiting", labels=["node"])
        forged = CounterMetricFamily("prfaas_node_refused_tickets", "Tickets that a node refused", labels=["node"])
        speed = GaugeMetricFamily("prfaas_node_prefill_tokens_per_second", "Learnt prefill speed", labels=["node"])
        links = [GaugeMetricFamily(name, text, labels=["cluster"]) for name, text in _LINK_GAUGES]
        probes = CounterMetricFamily("prfaas_link_probe_bytes", "Bytes that measured idle ways", labels=["cluster"])
        counts: dict[tuple[str, str, str], int] = {}
        for node in self._registry.nodes():
            key = (node.join.cluster, node.join.role.name.lower(), str(node.accepting).lower())
            counts[key] = counts.get(key, 0) + 1
            if node.heartbeat is not None and node.heartbeat.pages_total > 0:
                usage.add_metric([node.node_id], 1 - node.heartbeat.pages_free / node.heartbeat.pages_total)
            if node.heartbeat is not None:
                forged.add_metric([node.node_id], node.heartbeat.refused_tickets)
            queued.add_metric([node.node_id], node.queued_tokens)
            if node.speed.tokens_per_s is not None:
                speed.add_metric([node.node_id], node.speed.tokens_per_s)
        for labels, count in counts.items():
            nodes.add_metric(list(labels), count)
        for cluster in self._registry.clusters:
            link = self._registry.link(cluster.name)
            facts = link.facts(now)
            figures = (facts.bytes_per_s, facts.rtt_s, link.queueing_s, facts.loss, facts.utilisation, facts.congested)
            for gauge, figure in zip(links, figures, strict=True):
                if figure is not None:
                    gauge.add_metric([cluster.name], float(figure))
            probes.add_metric([cluster.name], link.probe_bytes)
        return [nodes, usage, queued, forged, speed, *links, probes]


class _PrefixIndex:
    """What the prefix index holds and has heard, as of now."""

    def __init__(self, index: KvIndex) -> None:
        self._index = index

    def collect(self) -> Iterable[Metric]:
        figures = self._index.figures
        gauges = (
            ("blocks", "Distinct blocks in the prefix index", len(self._index.index)),
            ("bytes", "About what the prefix index takes", self._index.nbytes),
            ("affinity", "Whether routing heeds it", float(self._index.trusted)),
            ("events_lag_seconds", "Age of the newest batch of KV events when it was applied", figures.lag_s),
        )
        counters = (
            ("batches", "Batches of KV events applied", figures.batches),
            ("events", "KV events applied", figures.events),
            ("gaps", "Gaps in the numbering of KV events", figures.gaps),
            ("replays", "Replays of KV events asked for", figures.replays),
            ("rebuilds", "Sources emptied for KV events that could not be had again", figures.rebuilds),
            ("errors", "Batches of KV events that were none", figures.errors),
            ("lookups", "Prompts looked up", figures.lookups),
            ("hits", "Prompts of which a node held something", figures.hits),
            ("asked_tokens", "Tokens of the prompts looked up, in full blocks", figures.asked_tokens),
            ("matched_tokens", "Of these, what the best node held", figures.matched_tokens),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"prfaas_kv_cache_index_{name}", text, value=value)
        for name, text, count in counters:
            yield CounterMetricFamily(f"prfaas_kv_cache_index_{name}", text, value=count)
