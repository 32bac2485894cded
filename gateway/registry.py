"""Clusters and nodes: which there are, and what was learnt of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from gateway.breakers import Breakers
from gateway.clusters import NO_TERMS, Cluster, ClusterState, Dial, keep, kept
from gateway.config import NAME
from gateway.errors import ApiError
from gateway.joining.newcomer import Newcomer
from gateway.joining.rules import Present
from gateway.joining.security import NO_SECURITY, ClusterSecurity
from gateway.sessions import NOTHING_SHOWN, NodeSession
from gateway.state import State
from gateway.terms import ClusterTerms
from kvcache.control import Join, Refused
from kvcache.fingerprint import Fingerprint
from kvcache.wire import Role
from scheduler.accuracy import TtftRatio
from scheduler.breaker import BreakerValues
from scheduler.leases import lease
from scheduler.links import LinkState

log = logging.getLogger(__name__)

MAX_EGRESS_GBPS = 1_000_000
_BYTES_PER_GBIT = 1e9 / 8


class Registry:
    """Clusters (kept in the state) and the sessions of joined nodes (kept in memory)."""

    def __init__(
        self,
        state: State,
        local_cluster: str,
        fingerprint: Fingerprint | None,
        context_tokens: int,
        breaker: BreakerValues | None = None,
    ) -> None:
        self._state = state
        self.breakers = Breakers(breaker or BreakerValues())
        self._fingerprint = fingerprint
        self._model_context = context_tokens
        self.local_cluster = local_cluster
        self._sessions: dict[str, NodeSession] = {}
        self._links: dict[str, LinkState] = {}
        self._outward: dict[str, LinkState] = {}
        self._accuracies: dict[str, TtftRatio] = {}
        self.last_accuracy = TtftRatio()
        """How far predictions of what comes last at home were off, which know nothing of what comes before it later."""
        self._clusters = kept(self._state, self.local_cluster)
        self._listed: dict[tuple[str | None, Role | None], Sequence[NodeSession]] = {}
        self._listed_clusters: Sequence[Cluster] | None = None

    # ---- clusters

    @property
    def clusters(self) -> Sequence[Cluster]:
        """Clusters that are not removed, the local one first."""
        if self._listed_clusters is None:
            found = [c for c in self._clusters.values() if c.state is not ClusterState.REMOVED]
            self._listed_clusters = tuple(sorted(found, key=lambda c: (not c.local, c.name)))
        return self._listed_clusters

    def cluster(self, name: str) -> Cluster:
        """A cluster by name. Raises ApiError 404."""
        found = self._clusters.get(name)
        if found is None or found.state is ClusterState.REMOVED:
            raise ApiError(404, f"no cluster is named {name!r}", param="cluster", code="cluster_not_found")
        return found

    def register(
        self,
        name: str,
        dial: Dial,
        egress_gbps: float = 0.0,
        terms: ClusterTerms = NO_TERMS,
        state: ClusterState = ClusterState.ACTIVE,
    ) -> Cluster:
        """Add a remote cluster, or bring a removed one back, whose old certificates stay revoked. Raises ApiError."""
        if not NAME.fullmatch(name):
            raise ApiError(400, "name: letters, digits, dot, dash and underscore, at most 63", param="name")
        if not 0 <= egress_gbps <= MAX_EGRESS_GBPS:
            raise ApiError(
                400, f"egress_gbps: {egress_gbps} is outside [0, {MAX_EGRESS_GBPS}]; 0 is no limit", param="egress_gbps"
            )
        terms.check()
        known = self._clusters.get(name)
        if known is not None and known.state is not ClusterState.REMOVED:
            raise ApiError(409, f"cluster {name!r} is registered already", param="name", code="cluster_exists")
        if dial is Dial.OUT and (unreachable := self._local_dialers()):
            raise ApiError(
                400,
                f"dial: {name!r} would only dial out, and so do {len(unreachable)} decode nodes at home; "
                "one side must accept",
                param="dial",
            )
        security = NO_SECURITY if known is None else msgspec.structs.replace(known.security, flagged=False)
        return self._set(Cluster(name, False, dial, state, time.time(), egress_gbps, terms, security))

    def approve(self, name: str) -> Cluster:
        """Let nodes of a pending cluster join; nothing changes for one that is approved. Raises ApiError."""
        cluster = self._remote(name)
        if cluster.state is not ClusterState.PENDING:
            return cluster
        return self._set(replace(cluster, state=ClusterState.ACTIVE))

    def secure(self, name: str, security: ClusterSecurity) -> Cluster:
        """Put another join token or epoch of certificates in force; the local cluster's too. Raises ApiError."""
        return self._set(replace(self.cluster(name), security=security))

    def set_terms(self, name: str, terms: ClusterTerms) -> Cluster:
        """Say anew where a cluster is, whether it is trusted and what it costs; the local one too. Raises ApiError."""
        terms.check()
        return self._set(replace(self.cluster(name), terms=terms))

    def set_draining(self, name: str, draining: bool) -> Cluster:
        """Stop or resume sending new work to a remote cluster, which then counts as honest again. Raises ApiError."""
        cluster = self._remote(name)
        if cluster.state is ClusterState.PENDING:
            raise ApiError(409, f"cluster {name!r} waits for approval", param="cluster", code="cluster_pending")
        if draining:
            return self._set(replace(cluster, state=ClusterState.DRAINING))
        security = msgspec.structs.replace(cluster.security, flagged=False)
        return self._set(replace(cluster, state=ClusterState.ACTIVE, security=security))

    def flag(self, name: str) -> Cluster:
        """Send a remote cluster no new work, as it lies. Raises ApiError."""
        cluster = self._remote(name)
        state = ClusterState.DRAINING if cluster.state is ClusterState.ACTIVE else cluster.state
        security = msgspec.structs.replace(cluster.security, flagged=True)
        return self._set(replace(cluster, state=state, security=security))

    def remove(self, name: str) -> Cluster:
        """Remove a remote cluster: its nodes are dismissed, its token and certificates revoked. Raises ApiError."""
        cluster = self._remote(name)
        removed = self._set(replace(cluster, state=ClusterState.REMOVED, security=cluster.security.revoked()))
        for session in self.nodes(name):
            session.lose("cluster_removed")
        return removed

    def reload(self) -> None:
        """Take what the state holds of clusters now; nodes of those that are removed or revoked are dismissed."""
        before, self._clusters = self._clusters, kept(self._state, self.local_cluster)
        self._listed_clusters = None
        for session in self.nodes():
            was, cluster = before.get(session.join.cluster), self._clusters.get(session.join.cluster)
            if cluster is None or cluster.state is ClusterState.REMOVED:
                session.lose("cluster_removed")
            elif was is not None and cluster.security.epoch > was.security.epoch:
                session.lose("credentials_revoked")

    @property
    def role_epoch(self) -> int:
        """The newest epoch that any joined node has obeyed."""
        return max((session.join.role_epoch for session in self._sessions.values()), default=0)

    def accuracy(self, cluster: str) -> TtftRatio:
        """How far predictions of what a cluster serves were off."""
        found = self._accuracies.get(cluster)
        if found is None:
            found = self._accuracies[cluster] = TtftRatio()
        return found

    def link(self, cluster: str) -> LinkState:
        """What was learnt of the way from a cluster to here."""
        found = self._links.get(cluster)
        if found is None:
            found = self._links[cluster] = LinkState()
        return found

    def outward(self, cluster: str) -> LinkState:
        """What was learnt of the way from here to a remote cluster, which only moved prefixes take."""
        found = self._outward.get(cluster)
        if found is None:
            found = self._outward[cluster] = LinkState()
        return found

    def lease(self, session: NodeSession) -> float | None:
        """Bytes per second that this node may send KV at, 0 without a limit; None where its cluster never had one."""
        cluster = self._clusters[session.join.cluster]
        if not cluster.egress_gbps:
            return None
        others = sum(other.sending for other in self.nodes(cluster.name) if other is not session)
        return lease(cluster.egress_gbps * _BYTES_PER_GBIT, others)

    # ---- nodes

    def nodes(self, cluster: str | None = None, role: Role | None = None) -> Sequence[NodeSession]:
        """Joined nodes, by name."""
        found = self._listed.get((cluster, role))
        if found is None:
            chosen = [
                s
                for s in self._sessions.values()
                if s.lost is None and cluster in (None, s.join.cluster) and role in (None, s.join.role)
            ]
            found = self._listed[cluster, role] = tuple(sorted(chosen, key=lambda s: s.node_id))
        return found

    def node(self, node_id: str) -> NodeSession | None:
        """A joined node by name."""
        session = self._sessions.get(node_id)
        return session if session is not None and session.lost is None else None

    def cannot_play(self, node: NodeSession, role: Role) -> str | None:
        """Why a joined node cannot take a role, with the cure; None where it can."""
        if node.join.cluster != self.local_cluster:
            return f"{node.node_id} is in {node.join.cluster!r}; only nodes of {self.local_cluster!r} change roles"
        if not node.join.converts:
            return f"{node.node_id} is too old to change its role; restart it with the other --role"
        other = self._present.unreachable(node.join, role)
        if other is not None:
            return f"{node.node_id} only dials out, and so does {other}; start one of them with --dial in"
        return None

    @property
    def chunk_tokens(self) -> int | None:
        """The chunk grid that all joined nodes share; None while there is none."""
        return next((s.join.model.chunk_tokens for s in self.nodes()), None)

    @property
    def context_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return min([self._model_context, *(s.join.model.context_tokens for s in self.nodes())])

    def admit(self, join: Join, now: float, credentials: Newcomer = NOTHING_SHOWN) -> NodeSession | Refused:
        """Take a node in, or say which field must change. A reconnect replaces the node's earlier stream."""
        refused = self._present.refusal(join)
        if refused is not None:
            log.warning("join refused node=%r field=%s", join.node_id[:63], refused.field)
            return refused
        earlier = self._sessions.get(join.node_id)
        if earlier is not None:
            earlier.lose("reconnected")
        session = NodeSession(join, now, credentials)
        session.changed = self._listed.clear
        self._sessions[join.node_id] = session
        session.changed()
        log.info("node joined node=%s cluster=%s role=%s", join.node_id, join.cluster, join.role.name.lower())
        return session

    def lost(self, session: NodeSession, cause: str) -> None:
        """A stream ended: its jobs fail, the node is gone unless it came back meanwhile."""
        session.lose(cause)
        if self._sessions.get(session.node_id) is session:
            del self._sessions[session.node_id]
            session.changed()
        log.info("node lost node=%s cause=%s", session.node_id, session.lost)

    @property
    def _present(self) -> Present:
        joins = {session.node_id: session.join for session in self.nodes()}
        return Present(self.local_cluster, self._fingerprint, self._clusters, joins, len(self._sessions))

    def _local_dialers(self) -> list[str]:
        local = self.nodes(self.local_cluster, Role.DECODE)
        return [session.node_id for session in local if session.join.kv_address is None]

    def _remote(self, name: str) -> Cluster:
        cluster = self.cluster(name)
        if cluster.local:
            raise ApiError(409, f"{name!r} is the local cluster", param="cluster", code="local_cluster")
        return cluster

    def _set(self, cluster: Cluster) -> Cluster:
        keep(self._state, cluster)
        self._clusters[cluster.name] = cluster
        self._listed_clusters = None
        return cluster
