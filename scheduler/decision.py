"""What a routing decision says, and why. A decision and its facts are what ``explain`` shows and a replay compares."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvcache.quality import Quality
from scheduler.facts import Facts


class Reason(StrEnum):
    """Why the prompt is prefilled where it is, or nowhere."""

    BELOW_THRESHOLD = "below_threshold"
    ABOVE_THRESHOLD = "above_threshold"
    HINT = "hint"
    NOTHING_TO_PREFILL = "nothing_to_prefill"
    REMOTE_SLOWER = "remote_slower"
    REMOTE_DEARER = "remote_dearer"
    HOME_BUSY = "home_busy"
    LINK_CONGESTED = "link_congested"
    BREAKER_OPEN = "breaker_open"
    NO_REMOTE = "no_remote_cluster"
    NO_LOCAL_PREFILL = "no_local_prefill_node"
    NO_WAY_AT_HOME = "no_way_at_home"
    WHOLE = "whole_request"
    OBSERVED = "observe_mode"
    FALLBACK = "fallback"
    NO_DECODE_NODE = "no_decode_node"
    NO_PREFILL = "no_prefill_node"
    HINTED_CLUSTER_UNAVAILABLE = "hinted_cluster_unavailable"
    OVERLOADED = "overloaded"
    RESIDENCY = "residency"


class Bar(StrEnum):
    """Why an option is not allowed."""

    SLOWER = "slower_than_local"
    CONGESTED = "link_congested"
    BREAKER_OPEN = "breaker_open"
    """Too much of what went there failed; it is tried again after a while."""
    BEING_MEASURED = "being_measured"
    """Something of it was never measured, and another request is finding it out."""


class CodecOption(msgspec.Struct, frozen=True, gc=False):
    """One set of codecs that a transfer could use. ``allowed``: the request's quality allows it.

    ``wire_bytes`` and ``predicted_ttft_s`` are None where something they need was never measured.
    """

    name: str
    quality: Quality
    allowed: bool
    wire_bytes: int | None
    predicted_ttft_s: float | None


class Move(msgspec.Struct, frozen=True, gc=False):
    """A prefix that goes first from where it is cached to the option's prefill node: tokens [start, stop).

    ``predicted_s`` is how long it takes to arrive there.
    """

    source_cluster: str
    source_node: str
    start: int
    stop: int
    nbytes: int
    predicted_s: float = 0.0


class Option(msgspec.Struct, frozen=True, gc=False):
    """One way to serve the request. ``predicted_ttft_s`` None: something it needs was never measured, or is too old.

    Prefill computes ``compute_increment`` tokens, [``cached_tokens``, N-1); tokens [``start``, N-1) are sent.
    ``codec`` is the chosen one of ``codecs`` and ``quality`` its; ``wire_bytes`` are what it is expected to send, the
    raw bytes where that was never measured, and ``codec_s`` the least seconds that it needs for the transfer.
    ``cost_s`` adds to the predicted TTFT what the option adds to others' waiting, its price, what a session's own node
    is worth, and where the threshold bends, what that makes of it. ``barred`` says why it is not ``allowed``.
    """

    cluster: str | None
    prefill_node: str | None
    decode_node: str
    compute_increment: int
    transfer_bytes: int
    codec: str
    allowed: bool
    predicted_ttft_s: float | None
    quality: Quality = Quality.EXACT
    wire_bytes: int = 0
    codec_s: float = 0.0
    codecs: tuple[CodecOption, ...] = ()
    start: int = 0
    cached_tokens: int = 0
    cost_s: float | None = None
    waiting_s: float = 0.0
    price: float = 0.0
    barred: Bar | None = None
    move: Move | None = None
    prefill_rank: int | None = None
    decode_rank: int | None = None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where to prefill and where to decode. ``chosen.cluster`` None prefills in place on the decode node.

    ``would_choose`` is what a policy that only observes would have done, where that is something else.
    """

    chosen: Option | None
    reason: Reason
    options: tuple[Option, ...]
    facts: Facts
    would_choose: Option | None = None

    @property
    def remote(self) -> bool:
        """Whether the chosen option prefills in another cluster than the local one."""
        if self.chosen is None or self.chosen.cluster is None:
            return False
        return any(cluster.name == self.chosen.cluster and not cluster.local for cluster in self.facts.clusters)
