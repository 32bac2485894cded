"""How fast a link is, learnt from observations that each say between which rates it lies.

What had too little to send, or waited for its engine or codec, only says that the link does at least so much: it may
raise the estimate and never lowers it. Nothing is divided by a rate that was not measured.
"""

from __future__ import annotations

from math import isfinite

from scheduler.speeds import SMOOTHING, Ewma

RISE, RISE_SHOWN = 0.7, 0.9
"""Of the way up: to what a transfer's time comes to, and to what was seen to be carried."""
FALL = 0.85
"""Of the way to a limit, in ratios: once a link cut to a twentieth was observed, the estimate is 1.6 times that."""
MIN_BYTES_PER_S, MAX_BYTES_PER_S = 1.0, 1e13
EXPOSED_SHARE = 0.25
"""A transfer of which less than this share lay bare was fed by the engine: its rate says little about the link."""
SENDING_SHARE = 0.25
"""At least this share of a transfer is taken to be sending, however long a round trip is said to be."""
CODEC_SHARE = 0.7
"""A transfer of which coding alone takes this share was fed by the codec: so does its rate."""
TELLING_SHARE = 0.25
"""An observation of this share of the estimate confirms it well enough to call it fresh."""
BEST_HALVES_S = 30.0


class LinkRate:
    """Bytes per second; None until something was seen that could be the link's limit. Time is handed in."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.confirmed_at = float("-inf")
        """When something was last seen that tells about the estimate."""
        self._usual_bytes = Ewma()
        self._best = 0.0
        self._best_at = 0.0

    def best(self, now: float) -> float | None:
        """The highest estimate of late; an older one counts half as much each half minute. None while unmeasured."""
        if self.value is None:
            return None
        kept: float = 0.5 ** (max(0.0, now - self._best_at) / BEST_HALVES_S)
        return max(self.value, self._best * kept)

    def between(self, at_least: float, at_most: float, now: float) -> None:
        """The link did ``at_least``, and no more than ``at_most``; 0, or what no link does, is not known."""
        low, high = (rate if plausible_rate(rate) else 0.0 for rate in (at_least, at_most))
        if high:
            high = max(low, high)
            if self.value is None:
                self._set(high, now)
            elif self.value > high:
                self._set(high * (self.value / high) ** (1 - FALL), now)
            self.confirmed_at = now
        if self.value is None or not low:
            return
        if low > self.value:
            self._set(self.value + RISE_SHOWN * (low - self.value), now)
        if low >= TELLING_SHARE * self.value:
            self.confirmed_at = now

    def committed(
        self,
        wire_bytes: int,
        transfer_s: float,
        exposed_s: float,
        rtt_s: float,
        codec_s: float,
        alone: bool,
        now: float,
    ) -> None:
        """A committed transfer, of which the round trip ``rtt_s`` that it begins with is no part of the rate.

        It lowers the estimate only where it was ``alone`` and mostly waited for the link, and one smaller than usual
        does so less, for what it measures is mostly other delays. Figures of 0 or less teach nothing.
        """
        if wire_bytes <= 0 or not transfer_s > 0 or not isfinite(transfer_s):
            return
        self.confirmed_at = now
        self._usual_bytes.add(wire_bytes)
        assert self._usual_bytes.value is not None
        rate = wire_bytes / max(transfer_s - rtt_s, SENDING_SHARE * transfer_s)
        rate = min(MAX_BYTES_PER_S, max(MIN_BYTES_PER_S, rate))
        if self.value is None:
            self._set(rate, now)
        elif rate > self.value:
            self._set(self.value + RISE * (rate - self.value), now)
        elif alone and exposed_s >= EXPOSED_SHARE * transfer_s and codec_s < CODEC_SHARE * transfer_s:
            weight = SMOOTHING * min(1.0, wire_bytes / self._usual_bytes.value)
            self._set(self.value + weight * (rate - self.value), now)

    def _set(self, rate: float, now: float) -> None:
        self.value = rate
        self._best, self._best_at = self.best(now) or rate, now


def plausible_rate(bytes_per_s: float) -> bool:
    """Whether a link could do this."""
    return MIN_BYTES_PER_S <= bytes_per_s <= MAX_BYTES_PER_S
