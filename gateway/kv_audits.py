"""Sampled audits of KV that remote clusters computed: decode nodes compute it again; a cluster that lies is drained.

What is asked of a decode node is done when it has nothing else to do; most of what is asked may never be answered.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.audit import AuditEntry, AuditLog
from gateway.errors import ApiError
from gateway.registry import Registry
from gateway.sessions import NodeLost, NodeSession
from kvcache.control.audits import AuditKv, KvAudited
from scheduler.auditing import AuditValues, ClusterAudits, chosen

log = logging.getLogger(__name__)

MOST_ASKED = 64
"""Audits without an answer; the oldest is forgotten for a new one."""
AGAIN_S = 5.0
"""After which a cluster that could not be drained is drained: other gateways must hear of it, too."""


@dataclass(frozen=True, slots=True)
class Served:
    """One prompt that a remote node prefilled and a decode node has committed."""

    cluster: str
    prefill_node: str
    decode: NodeSession
    token_ids: tuple[int, ...]
    salt: str
    lora: str
    exact: bool


class KvAudits:
    """Chooses, asks, and judges; shown on /metrics."""

    def __init__(
        self,
        registry: Registry,
        audit: AuditLog,
        values: Callable[[], AuditValues],
        writing: Callable[[], AbstractAsyncContextManager[None]],
        drawn: Callable[[], float] = random.random,
    ) -> None:
        self._registry = registry
        self._audit = audit
        self._values = values
        self._writing = writing
        self._drawn = drawn
        self._asked: OrderedDict[str, Served] = OrderedDict()
        self._clusters: dict[str, ClusterAudits] = {}
        self._draining: dict[str, asyncio.Task[None]] = {}

    async def stop(self) -> None:
        """End what is still being tried. Idempotent."""
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def of(self, cluster: str) -> ClusterAudits:
        """What audits of one cluster came to."""
        return self._clusters.setdefault(cluster, ClusterAudits())

    def served(self, one: Served) -> None:
        """A request has ended well: perhaps have its KV checked."""
        if not one.decode.join.audits or not chosen(self._values(), len(one.token_ids), one.exact, self._drawn()):
            return
        order = AuditKv(secrets.token_hex(8), one.token_ids, one.prefill_node, one.salt, one.lora)
        try:
            one.decode.send(order)
        except NodeLost:
            return
        self._asked[order.audit] = one
        if len(self._asked) > MOST_ASKED:
            self._asked.popitem(last=False)

    def answered(self, node: NodeSession, told: KvAudited) -> None:
        """A decode node has compared, or could not."""
        asked = self._asked.get(told.audit)
        if asked is None or asked.decode is not node:
            return
        del self._asked[told.audit]
        if not told.tokens:
            log.debug("audit not made node=%s cause=%s", node.node_id, told.cause[:40])
            return
        flags = self.of(asked.cluster).add(told.error, self._values())
        if told.error > self._values().tolerance:
            log.error(
                "KV is not what was asked for cluster=%s node=%s error=%.3g tokens=%d",
                *(asked.cluster, asked.prefill_node, told.error, told.tokens),
            )
        if flags:
            self._flag(asked, told)

    def collect(self) -> Iterable[Metric]:
        """Counters and gauges by cluster."""
        made = CounterMetricFamily("prfaas_kv_audits", "KV computed again and compared", labels=["cluster", "outcome"])
        flagged = GaugeMetricFamily("prfaas_kv_audit_flagged", "Whether audits flagged a cluster", labels=["cluster"])
        for name, audits in self._clusters.items():
            made.add_metric([name, "passed"], audits.passed)
            made.add_metric([name, "failed"], audits.failed)
        for cluster in self._registry.clusters:
            if not cluster.local:
                flagged.add_metric([cluster.name], float(cluster.security.flagged))
        return [made, flagged]

    def _flag(self, asked: Served, told: KvAudited) -> None:
        if asked.cluster in self._draining:
            return
        reason = (
            f"KV from {asked.prefill_node} was off by {told.error:.3g} of its size; resume it once that is explained"
        )
        self._audit.add(AuditEntry(time.time(), "kv audit", "drain", asked.cluster, "flagged", reason))
        self._draining[asked.cluster] = task = asyncio.create_task(self._drain(asked.cluster))
        task.add_done_callback(lambda _: self._draining.pop(asked.cluster, None))

    async def _drain(self, name: str) -> None:
        """Flag a cluster on all gateways, as soon as that can be done."""
        while True:
            try:
                async with self._writing():
                    self._registry.flag(name)
            except ApiError as error:
                log.error("cluster not drained cluster=%s cause=%s", name, error)
                if error.status == 404:  # it was removed meanwhile
                    return
                await asyncio.sleep(AGAIN_S)
            else:
                return
