"""Facts for the scheduler from what is known of external engines: they are decided for by the policy of nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from gateway.fleet.config import DialectName, EngineRole
from gateway.fleet.engine import Engine
from gateway.fleet.fleet import Fleet
from gateway.kv_lookup import Held
from gateway.terms import ClusterTerms
from kvcache.quality import Quality
from scheduler.candidates import KEEP, candidates
from scheduler.facts import ClusterFacts, CodecFacts, DecodeNodeFacts, Facts, PrefillNodeFacts, RequestFacts

RAW = (CodecFacts("raw", Quality.EXACT, 1.0, None, None),)
"""Engines hand KV to each other as it is."""
_NOTHING = Held(0, 0)
_UNKNOWN = ClusterTerms()
_by_tokens = attrgetter("prefilling_tokens")
_by_running = attrgetter("running")


@dataclass(frozen=True, slots=True)
class Terms:
    """What an operator said of a cluster; ``open`` where it is not drained or removed, and may serve the model."""

    terms: ClusterTerms = _UNKNOWN
    open: bool = True


def gather(
    fleet: Fleet,
    model: str,
    request: RequestFacts,
    threshold_tokens: int,
    now: float,
    without: Collection[str],
    held: Mapping[str, Held],
    terms: Callable[[str, str], Terms],
) -> Facts:
    """What a decision may know. Engines in ``without`` failed this request already and are left out."""
    engines = [one for one in fleet.of(model) if one.trouble is None and not one.draining and one.name not in without]
    most = {name: kept.held for name, kept in held.items()}
    home = fleet.local_cluster
    clusters: dict[str, list[Engine]] = {home: []}
    decoders = []
    for engine in engines:
        role, here = engine.config.role, engine.config.cluster == home
        if here and role is not EngineRole.PREFILL:
            decoders.append(engine)
        else:
            clusters.setdefault(engine.config.cluster, []).append(engine)
    chosen = _chosen(decoders, _by_running, most, request, now)
    return Facts(
        request,
        tuple(
            _cluster(fleet, name, found, request, now, most, held, terms(name, model))
            for name, found in clusters.items()
        ),
        tuple(_decoder(engine, held.get(engine.name, _NOTHING), now) for engine in chosen),
        threshold_tokens,
        time.gmtime().tm_hour,
    )


def _cluster(
    fleet: Fleet,
    name: str,
    engines: list[Engine],
    request: RequestFacts,
    now: float,
    most: Mapping[str, int],
    held: Mapping[str, Held],
    terms: Terms,
) -> ClusterFacts:
    chosen = _chosen(engines, _by_tokens, most, request, now)
    return ClusterFacts(
        name,
        name == fleet.local_cluster,
        terms.open and bool(engines),
        tuple(_prefiller(engine, held.get(engine.name, _NOTHING), now) for engine in chosen),
        fleet.link(name).facts(now),
        terms.terms.region,
        terms.terms.trusted,
        terms.terms.prices,
        fleet.accuracy(name).value(now),
        residency=terms.terms.residency,
    )


def _chosen(
    engines: Iterable[Engine],
    load: Callable[[Engine], float],
    most: Mapping[str, int],
    request: RequestFacts,
    now: float,
) -> list[Engine]:
    """Those worth looking at, and a few of those that breakers suspend, to be shown."""
    admitted: list[Engine] = []
    suspended: list[Engine] = []
    for engine in engines:
        (admitted if engine.breaker.admits(now) else suspended).append(engine)
    return candidates(admitted, load, most, request.session_nodes) + suspended[:KEEP]


def _prefiller(engine: Engine, held: Held, now: float) -> PrefillNodeFacts:
    return PrefillNodeFacts(
        engine.name,
        engine.prefilling_tokens,
        engine.free_slots,
        engine.speed.curve,
        held.resumable,
        held.held,
        codecs=RAW,
        dp_rank=held.dp_rank,
        moves=False,
        suspended=not engine.breaker.admits(now),
    )


def _decoder(engine: Engine, held: Held, now: float) -> DecodeNodeFacts:
    return DecodeNodeFacts(
        engine.name,
        engine.running,
        engine.free_slots,
        engine.speed.curve,
        held.resumable,
        held.held if held.exact else 0,
        codecs=RAW,
        dp_rank=held.dp_rank,
        suspended=not engine.breaker.admits(now),
        prefills=engine.config.dialect is not DialectName.SGLANG,
    )
