"""Clusters as operators registered them, and how each is kept in the state."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.joining.security import NO_SECURITY, ClusterSecurity
from gateway.state import State
from gateway.terms import ClusterTerms

NO_TERMS = ClusterTerms()


class Dial(StrEnum):
    """Whether a cluster's nodes accept KV connections, or only dial out."""

    IN = "in"
    OUT = "out"


class ClusterState(StrEnum):
    """Nodes of pending clusters wait for approval; draining ones finish what they have; removed ones may not join."""

    PENDING = "pending"
    ACTIVE = "active"
    DRAINING = "draining"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Cluster:
    """One registered cluster. ``egress_gbps`` is what all its nodes together may send KV at; 0 is no limit."""

    name: str
    local: bool
    dial: Dial
    state: ClusterState
    created: float
    egress_gbps: float = 0.0
    terms: ClusterTerms = NO_TERMS
    security: ClusterSecurity = NO_SECURITY


def keep(state: State, cluster: Cluster) -> None:
    """Write a cluster down, in place of what was kept of it before."""
    state.execute(
        "INSERT OR REPLACE INTO clusters (name, dial, state, created, egress_gbps, terms, security) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            cluster.name,
            cluster.dial.value,
            cluster.state.value,
            cluster.created,
            cluster.egress_gbps,
            msgspec.json.encode(cluster.terms).decode(),
            msgspec.json.encode(cluster.security).decode(),
        ),
    )


def kept(state: State, local: str) -> dict[str, Cluster]:
    """All clusters by name, removed ones too, and the ``local`` one, of which only terms and security are kept."""
    with state.reading("clusters"):
        rows = state.execute("SELECT name, dial, state, created, egress_gbps, terms, security FROM clusters")
        found = {
            n: Cluster(n, False, Dial(d), ClusterState(s), c, e, _terms(t), _security(own))
            for n, d, s, c, e, t, own in rows
        }
    earlier = found.get(local)
    terms, security = (NO_TERMS, NO_SECURITY) if earlier is None else (earlier.terms, earlier.security)
    found[local] = Cluster(local, True, Dial.IN, ClusterState.ACTIVE, time.time(), 0.0, terms, security)
    return found


def _terms(text: str | None) -> ClusterTerms:
    return NO_TERMS if text is None else msgspec.json.decode(text, type=ClusterTerms)


def _security(text: str | None) -> ClusterSecurity:
    return NO_SECURITY if text is None else msgspec.json.decode(text, type=ClusterSecurity)
