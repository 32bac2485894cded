"""Serving of models that split engines have, put together from what the gateway has anyway."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gateway.dialects.operation import Errands
from gateway.fleet.attempt import Calls
from gateway.fleet.facts import Terms
from gateway.fleet.fleet import Fleet
from gateway.fleet.health import HealthWatch
from gateway.fleet.life import Splits
from gateway.fleet.serving import SplitServing
from gateway.registry import ClusterState, Registry
from gateway.services import Services
from gateway.tokenizing import Tokenizing
from gateway.upstream.pool import Pool
from scheduler.policy import RoutingPolicy


def split_serving(
    services: Services, fleet: Fleet, pool: Pool, health: HealthWatch, tokenizing: Tokenizing
) -> SplitServing:
    """One for the gateway. Engines hand KV on as it is, so that is the codec that the policy counts with."""
    values = msgspec.structs.replace(services.policy.values, local_codec="raw", remote_codec="raw")
    own = replace(services, policy=RoutingPolicy(values))
    calls = Calls(fleet, pool, Errands(pool))

    def terms(name: str) -> Terms:
        return _terms(services.registry, name)

    return SplitServing(Splits(own, calls, health, terms), tokenizing)


def _terms(registry: Registry, name: str) -> Terms:
    """What is known of a cluster; of one that nobody registered nothing is, and it is open."""
    for cluster in registry.clusters:
        if cluster.name == name:
            return Terms(cluster.terms, cluster.state is ClusterState.ACTIVE)
    return Terms()
