"""The predicted time to first token of one option, or None where a figure it needs was never measured."""

from __future__ import annotations

from scheduler.facts import LinkFacts, PrefillNodeFacts

EXACTLY_RAW = "raw"


def compute_s(tokens: int, tokens_per_s: float | None) -> float | None:
    """Seconds to prefill ``tokens``; None where the speed was never measured."""
    if tokens <= 0:
        return 0.0
    if tokens_per_s is None or tokens_per_s <= 0:
        return None
    return tokens / tokens_per_s


def transfer_s(raw_bytes: int, codec: str, link: LinkFacts) -> float | None:
    """Seconds until ``raw_bytes`` have crossed a link behind what it already carries; None where unmeasured.

    ``raw`` needs no learnt ratio: its encoded bytes are its raw bytes.
    """
    ratio = 1.0 if codec == EXACTLY_RAW else link.wire_ratio
    if ratio is None or link.bytes_per_s is None or link.bytes_per_s <= 0:
        return None
    return (link.queued_bytes + raw_bytes) * ratio / link.bytes_per_s


def ttft_s(node: PrefillNodeFacts, increment: int, raw_bytes: int, codec: str, link: LinkFacts) -> float | None:
    """Predicted seconds to the first token when ``node`` computes ``increment`` tokens and sends ``raw_bytes``.

    The transfer overlaps the computation, so the slower of the two counts, and one round trip for the ask. A round trip
    that was never measured counts as nothing: it is the only figure that cannot dominate.
    """
    wait = compute_s(node.queued_tokens, node.prefill_tokens_per_s)
    compute = compute_s(increment, node.prefill_tokens_per_s)
    transfer = transfer_s(raw_bytes, codec, link)
    if wait is None or compute is None or transfer is None:
        return None
    return max(wait + compute, transfer) + (link.rtt_s or 0.0)
