"""What a routing decision says, and why. A decision and its facts are what ``explain`` shows and a replay compares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvcache.quality import Quality
from scheduler.facts import Facts


class Reason(StrEnum):
    """Why the prompt is prefilled where it is."""

    BELOW_THRESHOLD = "below_threshold"
    ABOVE_THRESHOLD = "above_threshold"
    HINT = "hint"
    NOTHING_TO_PREFILL = "nothing_to_prefill"
    REMOTE_SLOWER = "remote_slower"
    NO_REMOTE = "no_remote_cluster"
    NO_LOCAL_PREFILL = "no_local_prefill_node"
    FALLBACK = "fallback"


class Refusal(StrEnum):
    """Why nothing can be done; the gateway answers 503."""

    NO_DECODE_NODE = "no_decode_node"
    HINTED_CLUSTER_UNAVAILABLE = "hinted_cluster_unavailable"
    OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True)
class CodecOption:
    """One set of codecs that a transfer could use. ``allowed``: the request's quality allows it.

    ``wire_bytes`` and ``predicted_ttft_s`` are None where something they need was never measured.
    """

    name: str
    quality: Quality
    allowed: bool
    wire_bytes: int | None
    predicted_ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve the request. ``predicted_ttft_s`` None: something it needs was never measured.

    ``codec`` is the chosen one of ``codecs`` and ``quality`` its; ``wire_bytes`` are what it is expected to send, the
    raw bytes where that was never measured, and ``codec_s`` the least seconds that it needs for the transfer.
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


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to prefill and where to decode. ``chosen.cluster`` None prefills in place on the decode node."""

    chosen: Option | None
    reason: Reason | Refusal
    options: tuple[Option, ...]
    facts: Facts

    @property
    def remote(self) -> bool:
        """Whether the chosen option prefills in another cluster than the local one."""
        local = {cluster.name for cluster in self.facts.clusters if cluster.local}
        return self.chosen is not None and self.chosen.cluster is not None and self.chosen.cluster not in local
