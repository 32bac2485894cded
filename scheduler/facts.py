"""Everything a routing decision may know, as plain values. Times are seconds, sizes bytes, rates per second.

A rate of None was never measured; nothing divides by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvcache.quality import Quality


class RouteHint(StrEnum):
    """What a permitted client asked for; ``CLUSTER`` names one in ``RequestFacts.hint_cluster``."""

    NONE = "none"
    LOCAL = "local"
    REMOTE = "remote"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """What a set of codecs does on one node. ``quality`` is the strictest level that allows it.

    ``wire_ratio`` is encoded over raw bytes. Rates are raw bytes per second of one processor, digests included.
    """

    name: str
    quality: Quality
    wire_ratio: float | None
    encode_bytes_per_s: float | None
    decode_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class PrefillNodeFacts:
    """One prefill node as last heard of. ``cached_tokens`` is the prompt's prefix that it already holds.

    ``egress_bytes_per_s`` is its share of its cluster's way out; None where that has no limit. ``encoders`` processors
    encode one transfer at once.
    """

    node_id: str
    queued_tokens: int
    free_slots: int
    prefill_tokens_per_s: float | None
    cached_tokens: int = 0
    codecs: tuple[CodecFacts, ...] = ()
    egress_bytes_per_s: float | None = None
    encoders: int = 1


@dataclass(frozen=True, slots=True)
class DecodeNodeFacts:
    """One local decode node. ``cached_tokens`` is the prefix that need not be sent to it."""

    node_id: str
    running: int
    free_slots: int
    prefill_tokens_per_s: float | None
    cached_tokens: int = 0
    codecs: tuple[CodecFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """The way from a prefill cluster to the local decode nodes.

    ``bytes_per_s`` and ``queued_bytes`` count encoded bytes. ``fresh`` is False where nothing has crossed it of late.
    """

    bytes_per_s: float | None
    rtt_s: float | None
    queued_bytes: int = 0
    fresh: bool = True


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """One cluster that may prefill. ``reachable`` is False for drained, paused or lost ones."""

    name: str
    local: bool
    reachable: bool
    nodes: tuple[PrefillNodeFacts, ...]
    link: LinkFacts


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The request, tokenised. ``transfer_bytes`` is S_kv of the prompt less its last token and less what is cached.

    Of these ``last_bytes`` become final only with the last chunk, of ``last_tokens``: its own, windows and states.
    """

    request_id: str
    prompt_tokens: int
    transfer_bytes: int
    hint: RouteHint = RouteHint.NONE
    hint_cluster: str | None = None
    allowed_clusters: frozenset[str] | None = None
    quality: Quality = Quality.EXACT
    last_tokens: int = 0
    last_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """All that one decision sees."""

    request: RequestFacts
    clusters: tuple[ClusterFacts, ...]
    decode_nodes: tuple[DecodeNodeFacts, ...]
    threshold_tokens: int
