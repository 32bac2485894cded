"""What every request shares."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.affinity import Affinity
from gateway.building import AttemptBuilder
from gateway.config import GatewayConfig
from gateway.decisions import Decisions
from gateway.kv_audits import KvAudits
from gateway.kv_lookup import PrefixLookup
from gateway.live import LiveConfig
from gateway.metrics import Metrics
from gateway.model import ServedModel
from gateway.registry import Registry
from gateway.threshold import Threshold
from gateway.traffic import TrafficMeter
from gateway.waiting import WaitingRoom
from kvcache.tracing import NO_TRACER, Tracer
from scheduler.budget import FallbackBudget
from scheduler.policy import RoutingPolicy
from scheduler.retrying import RetryBudget


@dataclass(frozen=True, slots=True)
class Services:
    """Handed to each request's life by whoever composed them."""

    live: LiveConfig
    model: ServedModel
    registry: Registry
    policy: RoutingPolicy
    budget: FallbackBudget
    retries: RetryBudget
    builder: AttemptBuilder
    decisions: Decisions
    metrics: Metrics
    threshold: Threshold
    meter: TrafficMeter
    prefixes: PrefixLookup
    affinity: Affinity
    waiting: WaitingRoom
    audits: KvAudits
    tracer: Tracer = NO_TRACER

    @property
    def config(self) -> GatewayConfig:
        """What is in force now."""
        return self.live.now
