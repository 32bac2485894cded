"""What was learnt from finished work: prefill speed of a node, rate of the way from a cluster.

State that events update; a policy sees only what it answers. Time is handed in.
"""

from __future__ import annotations

from math import isfinite

from scheduler.facts import LinkFacts, PrefillCurve

SMOOTHING = 0.3
RISE = 0.7
TELLING_TOKENS = 256
"""A prefill of fewer tokens is mostly fixed cost; what it teaches counts in proportion."""
FRESH_S = 60.0
EXPOSED_SHARE = 0.25
"""A transfer of which less than this share lay bare was fed by the engine: its rate says little about the link."""
SENDING_SHARE = 0.25
"""At least this share of a transfer is taken to be sending, however long a round trip is said to be."""
CODEC_SHARE = 0.7
"""A transfer of which coding alone takes this share was fed by the codec: so does its rate."""


class Ewma:
    """An exponentially weighted mean. ``value`` is None until the first sample."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float, weight: float = SMOOTHING) -> None:
        """Move towards ``sample`` by ``weight``; the first sample is taken as it is."""
        assert 0 < weight <= 1
        self.value = sample if self.value is None else self.value + weight * (sample - self.value)


class PrefillSpeed:
    """Tokens per second of one node: what was observed, or what it claims while nothing was.

    Tokens and seconds are averaged apart and by length, and begin as a second's work at the claimed speed: a short
    prompt, whose fixed cost makes a node look slow, weighs little, the first one too.
    """

    def __init__(self) -> None:
        self._tokens = Ewma()
        self._seconds = Ewma()
        self._claimed: float | None = None

    def claim(self, tokens_per_s: float) -> None:
        """What the node says of itself; 0 or less is not a claim."""
        self._claimed = tokens_per_s if tokens_per_s > 0 and isfinite(tokens_per_s) else None

    def observe(self, tokens: int, seconds: float) -> None:
        """A finished prefill. Events without tokens or time teach nothing."""
        if tokens > 0 and seconds > 0 and isfinite(seconds):
            if self._tokens.value is None and self._claimed is not None:
                self._tokens.add(self._claimed)
                self._seconds.add(1.0)
            weight = SMOOTHING * min(1.0, tokens / TELLING_TOKENS)
            self._tokens.add(tokens, weight)
            self._seconds.add(seconds, weight)

    @property
    def tokens_per_s(self) -> float | None:
        """Observed speed first, then the claim, else None."""
        if self._tokens.value is None or self._seconds.value is None:
            return self._claimed
        return self._tokens.value / self._seconds.value

    @property
    def curve(self) -> PrefillCurve | None:
        """What a decision may know: the rate, for any length."""
        rate = self.tokens_per_s
        return None if rate is None else PrefillCurve.at_rate(rate)


class LinkSpeed:
    """The way from one cluster to the local decode nodes. All bytes are encoded ones.

    The rate rises fast and falls slowly, and a transfer that mostly waited for its engine or its codec can only raise
    it: a link is at least as fast as what it was seen to carry. The round trip that a transfer begins with, as short as
    it was ever seen, is no part of the rate. A transfer smaller than usual lowers it less, for what it measures is
    mostly other delays.
    """

    def __init__(self) -> None:
        self._rate = Ewma()
        self._usual_bytes = Ewma()
        self._rtt = Ewma()
        self._least_rtt: float | None = None
        self._observed_at = float("-inf")
        self.queued_bytes = 0

    def started(self, wire_bytes: int) -> None:
        """A transfer was asked for that is expected to take so many bytes."""
        self.queued_bytes += wire_bytes

    def ended(self, wire_bytes: int) -> None:
        """That transfer is over, well or not."""
        self.queued_bytes = max(0, self.queued_bytes - wire_bytes)

    def observe(self, wire_bytes: int, transfer_s: float, exposed_s: float, now: float, codec_s: float = 0.0) -> None:
        """A committed transfer, for which a codec needs ``codec_s`` at least; figures of 0 or less teach nothing."""
        if wire_bytes <= 0 or transfer_s <= 0:
            return
        self._observed_at = now
        self._usual_bytes.add(wire_bytes)
        assert self._usual_bytes.value is not None
        rate = wire_bytes / max(transfer_s - (self._least_rtt or 0.0), SENDING_SHARE * transfer_s)
        known = self._rate.value
        if known is None or rate > known:
            self._rate.add(rate, RISE)
        elif exposed_s >= EXPOSED_SHARE * transfer_s and codec_s < CODEC_SHARE * transfer_s:
            self._rate.add(rate, SMOOTHING * min(1.0, wire_bytes / self._usual_bytes.value))

    def observe_rtt(self, rtt_s: float) -> None:
        """A round trip as a node measured it; 0 or less is not a measurement."""
        if rtt_s > 0 and isfinite(rtt_s):
            self._rtt.add(rtt_s)
            self._least_rtt = min(rtt_s, self._least_rtt or rtt_s)

    @property
    def bytes_per_s(self) -> float | None:
        """The learnt rate, however old."""
        return self._rate.value

    def facts(self, now: float) -> LinkFacts:
        """What a decision may know of this link."""
        fresh = now - self._observed_at <= FRESH_S
        return LinkFacts(self._rate.value, self._rtt.value, self.queued_bytes, fresh)
