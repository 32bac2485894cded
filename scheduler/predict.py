"""The predicted time to first token of one option, or None where a figure it needs was never measured."""

from __future__ import annotations

import msgspec

from scheduler.facts import CodecFacts, LinkFacts, PrefillCurve, PrefillNodeFacts

RAW = "raw"


class Pace(msgspec.Struct, frozen=True, gc=False):
    """What of a prediction is the same whatever the codec; ``ttft_s`` adds the codec.

    Computing begins at ``begin_s``, takes ``compute_s``, and its last chunk ``last_s`` of that; ``last_share`` of what
    is sent becomes final only with that chunk. The link takes ``rate`` bytes per second and is busy for ``queue_s``.
    ``ratio`` is what was seen over what such predictions say.
    """

    begin_s: float
    compute_s: float
    last_s: float
    last_share: float
    rate: float
    queue_s: float
    rtt_s: float
    ratio: float

    def ttft_s(self, wire_bytes: float, coding_s: float) -> float:
        """Predicted seconds to the first token.

        Computing, encoding, sending and decoding overlap, piece by piece, so the slowest stage counts: for all bytes
        from the beginning on, for the last chunk's from its beginning on, and on the link behind what it carries
        already. One round trip is added for the ask; one that was never measured counts as nothing: it is the only
        figure that cannot dominate.
        """
        sending = wire_bytes / self.rate
        slowest = sending if sending > coding_s else coding_s
        computed = self.begin_s + self.compute_s
        last = computed - self.last_s + slowest * self.last_share
        done = self.queue_s + sending
        if done < self.begin_s + slowest:
            done = self.begin_s + slowest
        if done < last:
            done = last
        if done < computed:
            done = computed
        return (done + self.rtt_s) * self.ratio


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


def codec_s(raw_bytes: int, codec: CodecFacts, encoders: int, decode: float | None) -> float | None:
    """Seconds of encoding by ``encoders`` processors or decoding by one at the rate ``decode``, whichever is longer.

    None where encoding is unmeasured, but for ``raw``, which encodes nothing. Unmeasured decoding counts as nothing.
    """
    encode = codec.encode_bytes_per_s
    if not encode and codec.name != RAW:
        return None
    encoding = raw_bytes / (encode * encoders) if encode else 0.0
    decoding = raw_bytes / decode if decode else 0.0
    return encoding if encoding > decoding else decoding


def link_rate(node: PrefillNodeFacts, link: LinkFacts) -> float | None:
    """What the link was seen to carry, but no more than the node may send; None where it was never measured."""
    rate, share = link.bytes_per_s, node.egress_bytes_per_s
    if rate is None or rate <= 0:
        return None
    return share if share and share < rate else rate


def pace(
    node: PrefillNodeFacts,
    link: LinkFacts,
    start: int,
    stop: int,
    last_tokens: int = 0,
    last_share: float = 0.0,
    not_before_s: float = 0.0,
    ratio: float = 1.0,
) -> Pace | None:
    """How ``node`` gets on with tokens [start, stop), of which the last chunk has ``last_tokens``.

    It begins at ``not_before_s`` at the earliest, when a prefix that it builds on has come or is read. None where its
    speed or the link's was never measured.
    """
    curve, wait = node.prefill, wait_s(node)
    rate, share = link.bytes_per_s, node.egress_bytes_per_s
    if wait is None or rate is None or rate <= 0:
        return None
    if share and share < rate:
        rate = share
    compute = last = 0.0
    if stop > start:
        if curve is None:
            return None
        compute = curve.seconds(start, stop)
        if last_tokens:
            last = curve.seconds(stop - last_tokens, stop)
            if last > compute:
                last = compute
    begin = wait if wait > not_before_s else not_before_s
    return Pace(begin, compute, last, last_share, rate, link.queued_bytes / rate, link.rtt_s or 0.0, ratio)
