"""What a question changes: a fleet as it was last looked at, and the traffic that it had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from scheduler.case_study import BYTES_PER_S_PER_GBPS, LENGTHS, OUTPUT_TOKENS, PUBLISHED_T, hybrid
from scheduler.controller.observation import Kind, LocalNode, Observation, Stage
from scheduler.facts import FREE, Prices
from scheduler.report.requests import Served, Window
from scheduler.report.traffic import burstiness
from scheduler.throughput import PrefillCluster, PrefillNodes
from scheduler.what_if.question import EVERY, Question

LOCAL = "local"
PRESET_PREFILL = 3
PRESET_LOAD = 0.8
"""Of its capacity, where nobody states a rate for a preset."""
STRATA = 2048
LEAST_REQUESTS = 64


class NoBasis(ValueError):
    """There is nothing to change yet; says what is missing."""


class Basis(msgspec.Struct, frozen=True):
    """A fleet and its traffic. ``lengths`` (uncached tokens, at least 1) and ``outputs`` are of the same requests.

    ``rate`` is requests per second, None to be at ``PRESET_LOAD`` of capacity. ``cv`` is that of the gaps between
    arrivals. ``local`` is the local cluster's name. ``notes`` are what the answer should say of it.
    """

    seen: Observation
    lengths: tuple[int, ...]
    outputs: tuple[int, ...]
    rate: float | None
    cv: float
    chunk_tokens: int
    local: str = LOCAL
    prices: Mapping[str, Prices] = {}
    notes: tuple[str, ...] = ()


def case_study() -> Basis:
    """The published deployment at its published split and threshold."""
    site = hybrid(100.0)
    local = site.local[0]
    nodes = tuple(
        LocalNode(f"h20-{i}", "h20", Stage.PREFILL if i < PRESET_PREFILL else Stage.DECODE) for i in range(local.count)
    )
    seen = Observation(nodes, (Kind("h20", local.prefill, local.decode),), site.clusters, site.kv, PUBLISHED_T)
    lengths = tuple(round(LENGTHS.quantile((i + 0.5) / STRATA)) for i in range(STRATA))
    notes = (
        f"Without a rate the preset is asked about at {PRESET_LOAD * 100:.0f} % of today's capacity, before scaling.",
    )
    return Basis(seen, lengths, (OUTPUT_TOKENS,) * STRATA, None, 1.0, 2048, notes=notes)


def observed(
    seen: Observation | None,
    requests: Sequence[Served],
    window: Window,
    local: str,
    chunk_tokens: int,
    prices: Mapping[str, Prices],
) -> Basis:
    """A running gateway's. Raises NoBasis where too little is known."""
    pairs = [(r.uncached_tokens, r.output_tokens) for r in requests if r.uncached_tokens > 0 and r.output_tokens]
    if seen is None or not seen.nodes:
        raise NoBasis("no local node has shown yet how fast it prefills and decodes; or ask with preset case-study")
    if len(pairs) < LEAST_REQUESTS:
        raise NoBasis(
            f"{len(pairs)} finished requests are kept, below {LEAST_REQUESTS} they say too little; "
            "or ask with preset case-study"
        )
    cv = burstiness(requests) or 1.0
    notes = (
        f"Traffic: {len(pairs)} finished requests of {window.seconds / 60:.0f} minutes, drawn again with their "
        f"uncached lengths and answers; gaps with CV {cv:.2f}. What was cached stays cached.",
        "All local nodes count as alike, with what was learnt of them on average.",
    )
    return Basis(
        seen,
        tuple(length for length, _ in pairs),
        tuple(output or 1 for _, output in pairs),
        len(pairs) / window.seconds,
        min(max(cv, 0.2), 8.0),
        chunk_tokens,
        local,
        dict(prices),
        notes,
    )


def changed(basis: Basis, question: Question) -> Basis:
    """The basis with another fleet, other prices, prompts and answers. Raises ValueError naming the field."""
    names = [cluster.name for cluster in basis.seen.clusters]
    for field, allowed in (
        ("add_nodes", [basis.local, *names]),
        ("link_gbps", [EVERY, *names]),
        ("prices", [EVERY, basis.local, *names]),
    ):
        unknown = sorted(set(getattr(question, field)) - set(allowed))
        if unknown:
            raise ValueError(f"{field}.{unknown[0][:63]}: no cluster has that name; there are {', '.join(allowed)}")
    clusters = tuple(_cluster(cluster, question) for cluster in basis.seen.clusters)
    seen = replace(basis.seen, nodes=_nodes(basis, question), clusters=clusters)
    prices = {name: basis.prices.get(name, FREE) for name in (basis.local, *names)}
    everywhere = question.prices.get(EVERY)
    prices |= {} if everywhere is None else dict.fromkeys(names, everywhere)
    prices |= {name: one for name, one in question.prices.items() if name != EVERY}
    lengths = np.maximum(np.rint(np.asarray(basis.lengths) * question.input_scale), 1).astype(int)
    outputs = np.maximum(np.rint(np.asarray(basis.outputs) * question.output_scale), 1).astype(int)
    return msgspec.structs.replace(
        basis,
        seen=seen,
        prices=prices,
        lengths=tuple(lengths.tolist()),
        outputs=tuple(outputs.tolist()),
    )


def _cluster(cluster: PrefillCluster, question: Question) -> PrefillCluster:
    """More nodes of a cluster are of its commonest kind."""
    gbps = question.link_gbps.get(cluster.name, question.link_gbps.get(EVERY))
    if gbps is not None:
        cluster = replace(cluster, egress_bytes_per_s=gbps * BYTES_PER_S_PER_GBPS)
    more = question.add_nodes.get(cluster.name, 0)
    if not more:
        return cluster
    total = sum(nodes.count for nodes in cluster.nodes) + more
    if total < 1:
        raise ValueError(f"add_nodes.{cluster.name}: {more} leaves no node there; leave at least one")
    biggest = max(cluster.nodes, key=lambda nodes: nodes.count)
    if more < 0 and len(cluster.nodes) > 1:  # nodes that were learnt one by one: take the last ones away
        kept: list[PrefillNodes] = []
        for nodes in cluster.nodes:
            count = min(nodes.count, total - sum(one.count for one in kept))
            kept += [replace(nodes, count=count)] if count > 0 else []
        return replace(cluster, nodes=tuple(kept))
    others = tuple(nodes for nodes in cluster.nodes if nodes is not biggest)
    return replace(cluster, nodes=(replace(biggest, count=biggest.count + more), *others))


def _nodes(basis: Basis, question: Question) -> tuple[LocalNode, ...]:
    """More local nodes are of the commonest kind, and begin in decode; fewer are taken from there first."""
    nodes, more = list(basis.seen.nodes), question.add_nodes.get(basis.local, 0)
    if len(nodes) + more < 1:
        raise ValueError(f"add_nodes.{basis.local}: {more} leaves no local node; leave at least one")
    kinds = [node.kind for node in nodes]
    commonest = max(sorted(set(kinds)), key=kinds.count)
    nodes += [LocalNode(f"added-{i}", commonest, Stage.DECODE) for i in range(more)]
    if more < 0:
        nodes.sort(key=lambda node: node.goal is Stage.DECODE)  # those that prefill are kept first
        nodes = nodes[: len(nodes) + more]
    return tuple(nodes)
