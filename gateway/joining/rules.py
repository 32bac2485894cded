"""Which nodes may join: what each must say of itself, and what it must have in common with those that are here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.clusters import Cluster, ClusterState, Dial
from gateway.config import NAME
from kvcache.control import Join, Refused
from kvcache.fingerprint import Fingerprint
from kvcache.wire import Role

MAX_NODES = 4096
MAX_QUEUE = 1 << 20


@dataclass(frozen=True, slots=True)
class Present:
    """Who is here already: clusters by name, what joined nodes said by the nodes' names, and ``held`` streams.

    ``fingerprint`` is that of the model that all serve, None where there is none.
    """

    local_cluster: str
    fingerprint: Fingerprint | None
    clusters: Mapping[str, Cluster]
    joins: Mapping[str, Join]
    held: int

    def refusal(self, join: Join) -> Refused | None:
        """Which field of a Join must change, and how; None where the node may come in."""
        checks: tuple[Callable[[Join], Refused | None], ...] = (
            self._check_identity,
            self._check_cluster,
            self._check_model,
            self._check_dial,
        )
        return next((refused for check in checks if (refused := check(join)) is not None), None)

    def unreachable(self, join: Join, role: Role) -> str | None:
        """A node of the other role that this one could not exchange KV with, as neither accepts connections."""
        if join.kv_address is not None:
            return None
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        dialling = (name for name, each in self.joins.items() if each.role is other and each.kv_address is None)
        return min((name for name in dialling if name != join.node_id), default=None)

    def _check_identity(self, join: Join) -> Refused | None:
        if not NAME.fullmatch(join.node_id):
            return Refused("node_id", "letters, digits, dot, dash and underscore, at most 63; choose another --node-id")
        if not _plain(join.incarnation, 128):
            return Refused("incarnation", "1 to 128 printable characters")
        if not _plain(join.version, 128):
            return Refused("version", "1 to 128 printable characters")
        if len(join.public_key) != 32:
            return Refused("public_key", f"an Ed25519 key has 32 bytes, got {len(join.public_key)}")
        if not 1 <= join.max_queue <= MAX_QUEUE:
            return Refused("max_queue", f"must be from 1 to {MAX_QUEUE}, got {join.max_queue}")
        known = self.joins.get(join.node_id)
        if known is None:
            if self.held >= MAX_NODES:
                return Refused("node_id", f"this gateway holds {MAX_NODES} nodes already")
            return None
        # Peers of a transfer know each other's incarnation and key, so these alone make no node of another cluster's.
        if known.incarnation != join.incarnation or known.cluster != join.cluster:
            return Refused("node_id", f"{join.node_id!r} is joined by another process; choose another --node-id")
        if known.public_key != join.public_key:
            return Refused("public_key", "this incarnation joined with another key")
        return None

    def _check_cluster(self, join: Join) -> Refused | None:
        cluster = self.clusters.get(join.cluster)
        if cluster is None or cluster.state is ClusterState.REMOVED:
            word = "was removed" if cluster else "is not registered"
            cure = f"register it with `prfaas clusters register {join.cluster[:63]}`"
            return Refused("cluster", f"{join.cluster[:63]!r} {word}; {cure}")
        if cluster.state is ClusterState.PENDING:
            cure = f"an admin approves it with `prfaas clusters approve {cluster.name}`"
            return Refused("cluster", f"{cluster.name!r} waits for approval; {cure}")
        if join.role is Role.DECODE and not cluster.local:
            return Refused("role", f"cluster {join.cluster!r} prefills; decode nodes join {self.local_cluster!r}")
        return None

    def _check_model(self, join: Join) -> Refused | None:
        if self.fingerprint is None:
            return Refused("model", "this gateway has no nodes of its own; start it with --model for them")
        try:
            difference = self.fingerprint.difference(Fingerprint.from_parts(join.model.fingerprint))
        except ValueError as error:
            return Refused("fingerprint", str(error))
        if difference is not None:
            return Refused(
                f"fingerprint.{difference}", f"{difference} differs from the gateway's; serve the same model and dtype"
            )
        models = self.clusters[join.cluster].terms.models
        if models and join.model.name not in models:
            return Refused("model", f"cluster {join.cluster!r} is registered for {', '.join(models)} only")
        if join.model.context_tokens < 2 or join.model.chunk_tokens < 1:
            return Refused("model", "context_tokens and chunk_tokens must be positive")
        for name in sorted(self.joins):
            if name == join.node_id:
                continue
            for field in ("chunk_tokens", "context_tokens"):
                mine, theirs = getattr(join.model, field), getattr(self.joins[name].model, field)
                if mine != theirs:
                    return Refused(field, f"{mine}, but node {name!r} has {theirs}; start both alike")
        return None

    def _check_dial(self, join: Join) -> Refused | None:
        cluster = self.clusters[join.cluster]
        address = join.kv_address
        if address is not None and not (_plain(address.host, 253) and 1 <= address.port <= 65535):
            return Refused("kv_address", "no address that a peer can dial; give --kv-advertise HOST:PORT")
        if address is not None and not cluster.terms.reaches(address.host):
            known = ", ".join(cluster.terms.endpoints)
            return Refused("kv_address", f"{address.host} is not among the endpoints of {cluster.name!r} ({known})")
        if (join.kv_address is None) != (cluster.dial is Dial.OUT) and not cluster.local:
            word = "only dials out" if join.kv_address is None else "accepts connections"
            return Refused(
                "dial", f"cluster {join.cluster!r} is registered with dial: {cluster.dial}, but this node {word}"
            )
        other = self.unreachable(join, join.role)
        if other is not None:
            return Refused("dial", f"this node only dials out, and so does {other!r}; one must accept")
        return None


def _plain(text: str, most: int) -> bool:
    """Whether a text is safe in a log line and on a terminal, and no longer than this."""
    return 1 <= len(text) <= most and text.isprintable()
