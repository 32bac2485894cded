"""Everything a routing decision may know, as plain values. Times are seconds, sizes bytes, rates per second.

A figure of None was never measured; nothing divides by it. All of it is JSON both ways, which is how a record keeps it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvcache.quality import Quality


class RouteHint(StrEnum):
    """What a permitted client asked for; ``CLUSTER`` names one in ``RequestFacts.hint_cluster``."""

    NONE = "none"
    LOCAL = "local"
    REMOTE = "remote"
    CLUSTER = "cluster"


class SizeFacts(msgspec.Struct, frozen=True, gc=False):
    """What makes up S_kv of a layout, from which ``scheduler.sizes`` has the bytes of any range.

    ``per_token`` of all full-attention groups; ``windows`` of (tokens held, bytes a token), one a sliding group;
    ``state`` of all recurrent states.
    """

    per_token: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    state: int = 0


class PrefillCurve(msgspec.Struct, frozen=True, gc=False):
    """Seconds of one prefill: fixed, per token, and per square of a position, for a token attends to all before it."""

    fixed_s: float
    token_s: float
    square_s: float = 0.0

    @classmethod
    def at_rate(cls, tokens_per_s: float) -> PrefillCurve:
        """All that one rate says. Raises ValueError for a rate that is not positive."""
        if not tokens_per_s > 0:
            raise ValueError(f"tokens_per_s must be positive, got {tokens_per_s}")
        return cls(0.0, 1.0 / tokens_per_s)

    def seconds(self, start: int, stop: int) -> float:
        """To compute tokens [start, stop) of a prompt whose first ``start`` are cached; 0 where there are none."""
        if stop <= start:
            return 0.0
        return self.fixed_s + (stop - start) * (self.token_s + self.square_s * (start + stop))


class CodecFacts(msgspec.Struct, frozen=True, gc=False):
    """What a set of codecs does on one node. ``quality`` is the strictest level that allows it.

    ``wire_ratio`` is encoded over raw bytes. Rates are raw bytes per second of one processor, digests included.
    """

    name: str
    quality: Quality
    wire_ratio: float | None
    encode_bytes_per_s: float | None
    decode_bytes_per_s: float | None


class PrefillNodeFacts(msgspec.Struct, frozen=True, gc=False):
    """One prefill node, or one data-parallel rank of it, as last heard of.

    ``cached_tokens`` of the prompt need not be computed there: it holds the blocks, and windows and states at exactly
    that position. ``held_tokens`` is the longest prefix of which it holds the full-attention blocks alone.
    ``queued_s`` is the prefill time of what waits or runs there; None: take it from ``queued_tokens``. ``last_s`` is
    that of what comes after all other (``admission.holding``), which ``queued_s`` leaves out.
    ``egress_bytes_per_s`` is its share of its cluster's way out; None where that has no limit. ``encoders`` processors
    encode one transfer at once. ``loras`` are the adapters that it serves beside the plain model.
    ``moves``: it can hand a cached prefix on, and take one in; ``dialable``: its peers can dial it.
    ``suspended``: its circuit breaker lets nothing through now. ``reload_s`` is what it takes to read what of the
    prompt lies in files there, beside whatever waits or runs.
    """

    node_id: str
    queued_tokens: int
    free_slots: int
    prefill: PrefillCurve | None
    cached_tokens: int = 0
    held_tokens: int = 0
    codecs: tuple[CodecFacts, ...] = ()
    egress_bytes_per_s: float | None = None
    encoders: int = 1
    queued_s: float | None = None
    loras: frozenset[str] = frozenset()
    dp_rank: int | None = None
    moves: bool = True
    dialable: bool = True
    suspended: bool = False
    reload_s: float = 0.0
    last_s: float = 0.0


class DecodeNodeFacts(msgspec.Struct, frozen=True, gc=False):
    """One local decode node. ``held_tokens`` need not be sent to it, ``cached_tokens`` not be computed in place.

    ``prefills``: it can prefill in place, once it has read for ``reload_s`` what of the prompt lies in files there.
    """

    node_id: str
    running: int
    free_slots: int
    prefill: PrefillCurve | None
    cached_tokens: int = 0
    held_tokens: int = 0
    codecs: tuple[CodecFacts, ...] = ()
    loras: frozenset[str] = frozenset()
    dp_rank: int | None = None
    suspended: bool = False
    prefills: bool = True
    reload_s: float = 0.0


class LinkFacts(msgspec.Struct, frozen=True, gc=False):
    """One way between a prefill cluster and the local nodes.

    ``bytes_per_s`` and ``queued_bytes`` count encoded bytes; a rate of 0 is a link that carries nothing. ``fresh`` is
    False where nothing has crossed it of late. ``loss`` and ``utilisation`` are shares from 0 to 1.
    """

    bytes_per_s: float | None
    rtt_s: float | None
    queued_bytes: int = 0
    fresh: bool = True
    loss: float | None = None
    congested: bool = False
    utilisation: float | None = None


class Prices(msgspec.Struct, frozen=True, gc=False):
    """What work in a cluster costs, in one currency. ``by_hour`` multiplies both in each hour of the day, UTC.

    Empty ``by_hour`` is the same price all day; otherwise it has 24 factors.
    """

    egress_per_gb: float = 0.0
    prefill_per_s: float = 0.0
    by_hour: tuple[float, ...] = ()


FREE = Prices()


class ClusterFacts(msgspec.Struct, frozen=True, gc=False):
    """One cluster that may prefill. ``reachable`` is False for drained, paused or lost ones.

    ``link`` is the way from it to the local decode nodes, ``outward`` the way there, None where nothing can be sent to
    it. ``region`` is "" where its operator named none, and ``residency`` are more names for where its data stays.
    ``trusted``: its operator is. ``ttft_ratio`` is what its TTFT was seen to be over what was predicted, 1.0 while
    nothing was seen. ``suspended``: the circuit breaker of all that goes there lets nothing through now.
    """

    name: str
    local: bool
    reachable: bool
    nodes: tuple[PrefillNodeFacts, ...]
    link: LinkFacts
    region: str = ""
    trusted: bool = False
    prices: Prices = FREE
    ttft_ratio: float = 1.0
    outward: LinkFacts | None = None
    suspended: bool = False
    residency: tuple[str, ...] = ()


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """The request, tokenised, and where its prompt may go.

    ``chunk_tokens`` is the grid on which prefill is cut, 0 where no node has said. Of remote clusters
    ``allowed_clusters`` are permitted, None permits all; ``barred_clusters`` are not. ``regions``, unless None, are all
    that the prompt may be in, at home too. ``trusted_only`` bars remote clusters that are not trusted.
    ``session_nodes`` served the same session before. ``whole``: it is prefilled where it is decoded. It has waited for
    its turn for ``waited_s``.
    """

    request_id: str
    prompt_tokens: int
    sizes: SizeFacts
    chunk_tokens: int = 0
    hint: RouteHint = RouteHint.NONE
    hint_cluster: str | None = None
    allowed_clusters: frozenset[str] | None = None
    quality: Quality = Quality.EXACT
    barred_clusters: frozenset[str] = frozenset()
    regions: frozenset[str] | None = None
    trusted_only: bool = False
    tenant: str = ""
    lora: str = ""
    session_nodes: frozenset[str] = frozenset()
    whole: bool = False
    waited_s: float = 0.0


class Facts(msgspec.Struct, frozen=True, gc=False):
    """All that one decision sees. ``hour`` is that of the day, UTC, for prices.

    ``can_move``: there are nodes at home and elsewhere that can send a cached prefix to each other.
    """

    request: RequestFacts
    clusters: tuple[ClusterFacts, ...]
    decode_nodes: tuple[DecodeNodeFacts, ...]
    threshold_tokens: int
    hour: int = 0
    can_move: bool = False
