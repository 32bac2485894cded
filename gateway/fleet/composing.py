"""Serving of models that split engines have, put together from what the gateway has anyway."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gateway.clusters import ClusterState
from gateway.dialects.errands import Errands
from gateway.fleet.asked import Splits
from gateway.fleet.attempt import Calls
from gateway.fleet.facts import Terms
from gateway.fleet.fleet import Fleet
from gateway.fleet.health import HealthWatch
from gateway.fleet.serving import SplitServing
from gateway.registry import Registry
from gateway.services import Services
from gateway.tokenizing import Tokenizing
from gateway.upstream.pool import Pool
from scheduler.policy import RoutingPolicy
from scheduler.values import PolicyValues


def split_serving(
    services: Services, fleet: Fleet, pool: Pool, health: HealthWatch, tokenizing: Tokenizing
) -> SplitServing:
    """One for the gateway. Engines hand KV on as it is, so that is the codec that the policy counts with."""
    policy = RoutingPolicy(_values(services.policy.values))
    services.live.follow(lambda new: setattr(policy, "values", _values(new.policy)))
    own = replace(services, policy=policy)
    calls = Calls(fleet, pool, Errands(pool))

    def terms(name: str, model: str) -> Terms:
        return _terms(services.registry, name, model)

    return SplitServing(Splits(own, calls, health, terms), tokenizing)


def _values(given: PolicyValues) -> PolicyValues:
    return msgspec.structs.replace(given, local_codec="raw", remote_codec="raw")


def _terms(registry: Registry, name: str, model: str) -> Terms:
    """What is known of a cluster; of one that nobody registered nothing is, and it is open."""
    for cluster in registry.clusters:
        if cluster.name == name:
            named = not cluster.terms.models or model in cluster.terms.models
            return Terms(cluster.terms, cluster.state is ClusterState.ACTIVE and named)
    return Terms()
