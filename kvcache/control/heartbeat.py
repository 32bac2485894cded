"""How a node does, once a second: load, room, rates, caches and links."""

from __future__ import annotations

import msgspec

from kvcache.engine_figures import EngineFigures
from kvcache.tiers.report import TierReport
from kvcache.wire import Role


class CodecWork(msgspec.Struct, frozen=True):
    """What a set of codecs has done on a node: raw bytes and processor seconds, digests included, 0 for nothing.

    ``wire_bytes`` is what the ``encoded_bytes`` became.
    """

    codec: str
    encoded_bytes: int = 0
    wire_bytes: int = 0
    encode_s: float = 0.0
    decoded_bytes: int = 0
    decode_s: float = 0.0


class LinkReport(msgspec.Struct, frozen=True):
    """One KV peer as the kernel and the stream see it, over all connections to it. 0 means not measured.

    ``delivery_bytes_per_s`` is the sum of the connections' last rates that were the path's limit; ``app_limited`` says
    that lately there was too little to send to measure it anew. ``paced_bytes_per_s`` is what the kernel is told not to
    exceed, 0 without a limit.

    The others are of what this node sends. ``least_rtt_s`` is the path's own round trip, ``bytes_acked`` and
    ``bytes_resent`` count since the peer began, and ``probe_bytes`` is the part of both that measured idle connections.
    In the last second or so the path did ``at_least_bytes_per_s``, and where it was the limit no more than
    ``at_most_bytes_per_s``. For ``stalled_s`` nothing has been acknowledged though much waited.
    """

    peer_node: str
    rtt_s: float
    goodput_bytes_per_s: float
    bytes_received: int
    bytes_sent: int
    retransmits: int
    connections: int = 0
    connections_lost: int = 0
    delivery_bytes_per_s: float = 0.0
    app_limited: bool = True
    paced_bytes_per_s: float = 0.0
    least_rtt_s: float = 0.0
    bytes_acked: int = 0
    bytes_resent: int = 0
    probe_bytes: int = 0
    at_least_bytes_per_s: float = 0.0
    at_most_bytes_per_s: float = 0.0
    stalled_s: float = 0.0


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Once a second, and at once after a change of ``accepting``. Rates are 0 while nothing was measured.

    ``codecs`` is what those of the Join have done in transfers since the node started. ``detail`` says what keeps the
    node from taking or beginning work, "" where nothing does; other nodes' troubles are not its own.

    ``tiers`` are those below the pool, the fastest first.
    Pages that the prefix cache can let go of count as free; it keeps ``pages_cached``. Since the node started
    ``cache_hits`` jobs have found ``cache_hit_tokens`` there, and ``pages_evicted`` were let go of. ``engine`` is what
    an engine with a cache of its own says of that.

    Other gateways than the one that hears this gave the node ``others_jobs`` that are at hand, with ``others_tokens``
    of prompts to compute. It plays ``role`` since the ChangeRole of ``role_epoch``, whichever gateway gave that. Nodes
    before this version leave both None.

    The node remembers ``tickets`` that were used or wait for their job, and has turned away ``refused_tickets``. It
    runs ``tasks``, and has ``files`` open.
    """

    accepting: bool
    queued_jobs: int
    queued_tokens: int
    running: int
    pages_total: int
    pages_free: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    open_transfers: int
    detail: str = ""
    links: tuple[LinkReport, ...] = ()
    codecs: tuple[CodecWork, ...] = ()
    pages_cached: int = 0
    cache_hits: int = 0
    cache_hit_tokens: int = 0
    pages_evicted: int = 0
    tiers: tuple[TierReport, ...] = ()
    engine: EngineFigures | None = None
    others_jobs: int | None = None
    others_tokens: int = 0
    role: Role | None = None
    role_epoch: int = 0
    tickets: int = 0
    refused_tickets: int = 0
    tasks: int = 0
    files: int = 0


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The gateway is alive."""
