"""What every job of the serving side shares with its node."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from engines.protocol import Engine
from kvcache.blocks import PageGeometry
from kvcache.checkpoints import CheckpointPolicy
from kvcache.codecs import Transform
from kvcache.codecs.meter import CodecMeter
from kvcache.control import FromNode
from kvcache.hostpool import HostPool
from kvcache.room import PageRoom
from kvcache.tiers.hierarchy import Tiers
from kvcache.tracing import NO_TRACER, Tracer
from kvcache.transport import KvEndpoint


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Times in seconds. A batch is what one thread encodes at once, or only digests where nothing is encoded;
    ``batches_ahead`` of them wait for the wire, where up to ``wire_bytes_ahead`` wait for room on a connection. At most
    ``early_bytes`` (raw) of a transfer leave before its Grant has come.
    """

    open_wait_s: float = 2.0
    max_queue: int = 32
    max_early_opens: int = 64
    clock_skew_s: float = 2.0
    batch_bytes: int = 1 << 20
    digest_batch_bytes: int = 4 << 20
    batches_ahead: int = 2
    wire_bytes_ahead: int = 4 << 20
    early_bytes: int = 4 << 20
    engine_patience_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """Handed in by the node. ``engine`` gives the running engine, or None while there is none.

    ``executor`` runs encoders and digests, which ``meter`` counts; ``report`` sends to the gateway and never waits;
    ``chunk_tokens`` and ``fingerprint`` are this node's, and a ticket must name the same. ``transforms`` are the
    calibrations at hand, ``checkpoints`` says where prefills leave snapshots. ``tiers`` hold
    what the pool let go of, None where nothing does.
    """

    node_id: str
    incarnation: str
    fingerprint: str
    chunk_tokens: int
    geometry: PageGeometry
    pool: HostPool
    room: PageRoom
    engine: Callable[[], Engine | None]
    executor: Executor
    endpoint: Callable[[], KvEndpoint]
    report: Callable[[FromNode], None]
    transforms: tuple[Transform, ...] = ()
    tracer: Tracer = NO_TRACER
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    checkpoints: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    meter: CodecMeter = field(default_factory=CodecMeter)
    tiers: Tiers | None = None
