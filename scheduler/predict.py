"""The predicted time to first token of one option, or None where a figure it needs was never measured."""

from __future__ import annotations

import msgspec

from scheduler.facts import CodecFacts, LinkFacts, PrefillCurve, PrefillNodeFacts

RAW = "raw"


class Export(msgspec.Struct, frozen=True, gc=False):
    """One prefill that computes tokens [start, stop) and sends ``raw_bytes``.

    ``last_bytes`` of them become final only with the last ``last_tokens``.
    """

    start: int
    stop: int
    raw_bytes: int
    last_tokens: int = 0
    last_bytes: int = 0


def compute_s(start: int, stop: int, curve: PrefillCurve | None) -> float | None:
    """Seconds to prefill tokens [start, stop); None where the node was never measured, 0 where there are none."""
    if stop <= start:
        return 0.0
    return None if curve is None else curve.seconds(start, stop)


def wait_s(node: PrefillNodeFacts) -> float | None:
    """Seconds until what waits or runs on a node is done; None where that was never measured.

    Where only its tokens are known they are taken for one prompt.
    """
    if node.queued_s is not None:
        return node.queued_s
    return compute_s(0, node.queued_tokens, node.prefill)


def wire_ratio(codec: CodecFacts) -> float | None:
    """Encoded over raw bytes. ``raw`` needs no learnt one: its encoded bytes are its raw bytes."""
    return 1.0 if codec.name == RAW else codec.wire_ratio


def codec_s(raw_bytes: int, codec: CodecFacts, encoders: int) -> float | None:
    """Seconds of encoding by ``encoders`` processors or decoding by one, whichever takes longer.

    None where encoding is unmeasured, but for ``raw``, which encodes nothing. Unmeasured decoding counts as nothing.
    """
    if not codec.encode_bytes_per_s and codec.name != RAW:
        return None
    encoding = raw_bytes / (codec.encode_bytes_per_s * encoders) if codec.encode_bytes_per_s else 0.0
    decoding = raw_bytes / codec.decode_bytes_per_s if codec.decode_bytes_per_s else 0.0
    return max(encoding, decoding)


def ttft_s(node: PrefillNodeFacts, export: Export, codec: CodecFacts, link: LinkFacts) -> float | None:
    """Predicted seconds to the first token when ``node`` computes and sends ``export``.

    Computing, encoding, sending and decoding overlap, piece by piece, so the slowest stage counts: for all bytes from
    the beginning on, for the last chunk's from its beginning on, and on the link behind what it carries already. The
    link is as fast as it was seen to be, but no faster than what the node may send. One round trip is added for the
    ask; one that was never measured counts as nothing: it is the only figure that cannot dominate.
    """
    wait, compute = wait_s(node), compute_s(export.start, export.stop, node.prefill)
    ratio, coding = wire_ratio(codec), codec_s(export.raw_bytes, codec, node.encoders)
    if wait is None or compute is None or ratio is None or coding is None:
        return None
    if link.bytes_per_s is None or link.bytes_per_s <= 0:
        return None
    rate = min(link.bytes_per_s, node.egress_bytes_per_s or link.bytes_per_s)
    sending = export.raw_bytes * ratio / rate
    slowest = max(coding, sending)
    last = last_bytes = 0.0
    if export.last_tokens and node.prefill is not None:
        last = min(compute, compute_s(export.stop - export.last_tokens, export.stop, node.prefill) or 0.0)
    if export.raw_bytes > 0:
        last_bytes = min(1.0, export.last_bytes / export.raw_bytes)
    done = max(
        link.queued_bytes / rate + sending,
        wait + slowest,
        wait + compute - last + slowest * last_bytes,
        wait + compute,
    )
    return done + (link.rtt_s or 0.0)
