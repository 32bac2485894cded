"""From what the registry and the meter know to what the long-term controller is told."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from gateway.clusters import ClusterState
from gateway.registry import Registry
from gateway.sessions import NodeSession
from gateway.traffic import TrafficMeter
from kvcache.layout import KVLayout
from kvcache.wire import Role
from scheduler.controller.observation import Kind, LocalNode, Observation, Stage
from scheduler.prefill_curve import plausible_rate
from scheduler.profiles import KILO, DecodeProfile, KvSize, PrefillProfile
from scheduler.throughput import PrefillCluster, PrefillNodes

KIND = "local"
DEFAULT_BATCH = 16
"""Of a node that does not say how many answers it speaks at once."""


class Observer:
    """Makes an ``Observation`` per step. All local nodes count as of one kind, the mean of what was learnt of them."""

    def __init__(self, registry: Registry, meter: TrafficMeter, layout: KVLayout) -> None:
        self._registry = registry
        self._meter = meter
        self._kv = KvSize.of(layout)

    def observe(self, threshold_tokens: int, failed: tuple[str, ...]) -> Observation | None:
        """What there is now; None while no local node has shown how fast it prefills and decodes.

        What the meter counted meanwhile is dropped then: nothing could be made of it.
        """
        lengths, spoken = self._meter.take()
        nodes = self._registry.nodes(self._registry.local_cluster)
        prefill, decode = _prefill(nodes), _decode(nodes)
        if prefill is None or decode is None:
            return None
        return Observation(
            nodes=tuple(self._node(node) for node in nodes if node.heartbeat is not None),
            kinds=(Kind(KIND, prefill, decode),),
            clusters=tuple(self._clusters(prefill)),
            kv=self._kv,
            threshold=float(threshold_tokens),
            lengths=lengths,
            spoken=spoken,
            waiting_prefill=_waiting(self._registry.nodes(role=Role.PREFILL)),
            waiting_decode=_waiting(self._registry.nodes(role=Role.DECODE)),
            failed=failed,
        )

    def _node(self, node: NodeSession) -> LocalNode:
        role, beat = node.join.role, node.heartbeat
        running = 0 if beat is None else beat.running
        most = 1 if role is Role.PREFILL else node.join.max_running or DEFAULT_BATCH
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        return LocalNode(
            node_id=node.node_id,
            kind=KIND,
            stage=_stage(role),
            becoming=None if node.becoming is None else _stage(node.becoming),
            work=float(node.queued_tokens if role is Role.PREFILL else len(node.jobs)),
            busy=min(1.0, running / most),
            convertible=node.accepting and self._registry.cannot_play(node, other) is None,
        )

    def _clusters(self, like: PrefillProfile) -> list[PrefillCluster]:
        found = []
        for cluster in self._registry.clusters:
            nodes = [node for node in self._registry.nodes(cluster.name, Role.PREFILL) if node.accepting]
            if cluster.local or cluster.state is not ClusterState.ACTIVE or not nodes:
                continue
            kinds = tuple(PrefillNodes(1, _of(node) or like) for node in nodes)
            rate = self._registry.link(cluster.name).bytes_per_s
            found.append(PrefillCluster(cluster.name, kinds, inf if rate is None else rate))
        return found


def _prefill(nodes: Sequence[NodeSession]) -> PrefillProfile | None:
    curves = [curve for node in nodes if (curve := node.speed.curve) is not None]
    if not curves:
        return None
    count = len(curves)
    return _profile(
        KIND,
        sum(curve.fixed_s for curve in curves) / count,
        sum(curve.token_s for curve in curves) / count,
        sum(curve.square_s for curve in curves) / count,
    )


def _of(node: NodeSession) -> PrefillProfile | None:
    curve = node.speed.curve
    return None if curve is None else _profile(node.node_id, curve.fixed_s, curve.token_s, curve.square_s)


def _profile(name: str, fixed_s: float, token_s: float, square_s: float) -> PrefillProfile:
    return PrefillProfile(name, fixed_s, token_s * KILO, square_s * KILO * KILO)


def _decode(nodes: Sequence[NodeSession]) -> DecodeProfile | None:
    said = [(node, node.heartbeat.decode_tokens_per_s) for node in nodes if node.heartbeat is not None]
    rates = [(node.join.max_running or DEFAULT_BATCH, rate) for node, rate in said if plausible_rate(rate)]
    if not rates:
        return None
    batch = round(sum(most for most, _ in rates) / len(rates))
    return DecodeProfile(batch, len(rates) / sum(rate for _, rate in rates))


def _waiting(nodes: Sequence[NodeSession]) -> int:
    return sum(node.heartbeat.queued_jobs for node in nodes if node.heartbeat is not None)


def _stage(role: Role) -> Stage:
    return Stage.PREFILL if role is Role.PREFILL else Stage.DECODE
