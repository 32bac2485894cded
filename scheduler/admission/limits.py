"""What one key or tenant may use: requests and tokens a minute, requests at once; and what it has used of that."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from scheduler.admission.bucket import TokenBucket

MINUTE_S = 60.0
BURST_S = 3.0
"""What may come at once, as time at the full rate: so much above the rate can pass in any minute, a twentieth of it."""
SLOT_RETRY_S = 1.0


class Limits(msgspec.Struct, frozen=True):
    """None is no limit. Tokens are those of prompts and of answers."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


NO_LIMITS = Limits()


class Limit(StrEnum):
    """The limits by name, as operators set them."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"


class Refusal(msgspec.Struct, frozen=True):
    """Which limit is reached, and when to come again."""

    limit: Limit
    value: int
    retry_after_s: float


class Usage:
    """What one holder of limits uses. Ask first, of all holders concerned, then begin or spend at each of them."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.running = 0
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)

    def follow(self, limits: Limits, now: float) -> None:
        """Heed these limits from now on."""
        if limits == self.limits:
            return
        self._requests = _changed(self._requests, limits.requests_per_minute, now)
        self._tokens = _changed(self._tokens, limits.tokens_per_minute, now)
        self.limits = limits

    def refusal(self, now: float) -> Refusal | None:
        """Why another request may not begin now."""
        most, a_minute = self.limits.concurrency, self.limits.requests_per_minute
        if most is not None and self.running >= most:
            return Refusal(Limit.CONCURRENCY, most, SLOT_RETRY_S)
        if self._requests is not None and a_minute is not None:
            wait = self._requests.wait_s(1, now)
            if wait > 0:
                return Refusal(Limit.REQUESTS, a_minute, wait)
        return None

    def begin(self, now: float) -> None:
        """A request begins; ``end`` follows."""
        self.running += 1
        if self._requests is not None:
            self._requests.spend(1, now)

    def token_refusal(self, tokens: float, now: float) -> Refusal | None:
        """Why so many tokens may not be used now."""
        a_minute = self.limits.tokens_per_minute
        if self._tokens is None or a_minute is None:
            return None
        wait = self._tokens.wait_s(tokens, now)
        return Refusal(Limit.TOKENS, a_minute, wait) if wait > 0 else None

    def spend(self, tokens: float, now: float) -> None:
        """Tokens are used, or fewer than was said before were."""
        if self._tokens is not None:
            self._tokens.spend(tokens, now)

    def end(self) -> None:
        """A request that began is over."""
        assert self.running > 0
        self.running -= 1

    def unused(self, now: float) -> bool:
        """Whether it could be forgotten and begun anew without a difference."""
        return not self.running and all(one is None or one.full(now) for one in (self._requests, self._tokens))


def _bucket(a_minute: int | None, now: float) -> TokenBucket | None:
    return None if a_minute is None else TokenBucket(a_minute / MINUTE_S, _burst(a_minute), now)


def _changed(bucket: TokenBucket | None, a_minute: int | None, now: float) -> TokenBucket | None:
    if bucket is None or a_minute is None:
        return _bucket(a_minute, now)
    bucket.change(a_minute / MINUTE_S, _burst(a_minute), now)
    return bucket


def _burst(a_minute: int) -> float:
    return max(1.0, a_minute * BURST_S / MINUTE_S)
