"""What every job of the asking side shares with its node."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from tokenizers import Tokenizer

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
class ClientLimits:
    """Times in seconds. ``scratch_bytes`` bounds what one peer may have sent that is not yet decoded.

    At most ``max_answers`` are spoken to one prompt.

    A batch is what one thread decodes and checks at once, or only checks where nothing is encoded. Every ``ack_every``
    verified pieces are acknowledged, and fewer where nothing has come since, ``ack_pause_s`` apart. After the Manifest
    the next missing piece is awaited for ``straggler_s``: longer than it takes to notice a lost connection. Up to
    ``early_bytes`` (raw) of a transfer may come before its Grant where there seems to be room.
    """

    max_jobs: int = 64
    max_answers: int = 16
    clock_skew_s: float = 2.0
    batch_bytes: int = 1 << 20
    digest_batch_bytes: int = 4 << 20
    scratch_bytes: int = 32 << 20
    ack_every: int = 16
    ack_pause_s: float = 0.005
    early_bytes: int = 4 << 20
    straggler_s: float = 8.0
    engine_patience_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ClientContext:
    """Handed in by the node. ``engine`` gives the running engine, or None while there is none.

    ``executor`` runs decoders and digests, which ``meter`` counts; ``report`` sends to the gateway and never waits;
    ``public_key``, ``chunk_tokens`` and ``fingerprint`` are this node's, and a ticket must name the same.
    ``transforms`` are the calibrations at hand, ``checkpoints`` says where prefills in place leave snapshots.
    ``tiers`` hold what the pool let go of, None where nothing does.
    ``node_id`` is the origin of what is computed here.
    """

    node_id: str
    public_key: bytes
    fingerprint: str
    chunk_tokens: int
    geometry: PageGeometry
    pool: HostPool
    room: PageRoom
    engine: Callable[[], Engine | None]
    executor: Executor
    endpoint: Callable[[], KvEndpoint]
    report: Callable[[FromNode], None]
    tokenizer: Tokenizer
    transforms: tuple[Transform, ...] = ()
    tracer: Tracer = NO_TRACER
    limits: ClientLimits = field(default_factory=ClientLimits)
    checkpoints: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    meter: CodecMeter = field(default_factory=CodecMeter)
    tiers: Tiers | None = None
