"""What one key or tenant may use: requests and tokens a minute, requests at once; and what it has used of that.

Where several gateways let requests in, each has a slice of every limit, and all slices together are no more than it.
"""

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
LEAST_SHARE = 1e-3
"""A bucket must fill, however slowly: who has less of a limit may still let one request in and owe it."""


class Slice(msgspec.Struct, frozen=True):
    """What one gateway may let in of a holder's limits: shares of both rates, and a number of requests at once.

    ``slots`` None is all that the limit allows.
    """

    requests: float = 1.0
    tokens: float = 1.0
    slots: int | None = None


WHOLE = Slice()


class Demand(msgspec.Struct, frozen=True):
    """What was asked of a holder's limits since the last look, let in or not; ``slots`` is the most at once."""

    requests: int
    tokens: float
    slots: int


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


class Left(msgspec.Struct, frozen=True):
    """Of a rate of so many a minute: what may be used at once, and in how many seconds all of that is back."""

    value: int
    remaining: int
    reset_s: float


class Usage:
    """What one holder of limits uses. Ask first, of all holders concerned, then begin or spend at each of them."""

    def __init__(self, limits: Limits, now: float, of: Slice = WHOLE) -> None:
        self.limits = limits
        self.slice = of
        self.running = 0
        self._asked_requests = 0
        self._asked_tokens = 0.0
        self._turned_away = 0
        self._most_running = 0
        self._requests = _bucket(limits.requests_per_minute, of.requests, now)
        self._tokens = _bucket(limits.tokens_per_minute, of.tokens, now)

    def follow(self, limits: Limits, now: float) -> None:
        """Heed these limits from now on."""
        self._change(limits, self.slice, now)

    def lease(self, of: Slice, now: float) -> None:
        """Heed this slice of the limits from now on."""
        self._change(self.limits, of, now)

    def first_lease(self, of: Slice, now: float) -> None:
        """Heed this slice, which nothing was used of yet: what may come at once of it is there."""
        if self.unused(now):
            self._requests = _bucket(self.limits.requests_per_minute, of.requests, now)
            self._tokens = _bucket(self.limits.tokens_per_minute, of.tokens, now)
        self._change(self.limits, of, now)

    def exhausted(self, now: float) -> bool:
        """Whether another request, or its first token, would be refused now."""
        most = self.limits.concurrency if self.slice.slots is None else self.slice.slots
        full = most is not None and self.limits.concurrency is not None and self.running >= most
        return full or any(one is not None and one.wait_s(1, now) > 0 for one in (self._requests, self._tokens))

    def demand(self) -> Demand:
        """What was asked since this was last called."""
        asked = Demand(self._asked_requests, self._asked_tokens, self._most_running + self._turned_away)
        self._asked_requests, self._asked_tokens, self._turned_away, self._most_running = 0, 0.0, 0, self.running
        return asked

    def refusal(self, now: float) -> Refusal | None:
        """Why another request may not begin now."""
        most, a_minute = self.limits.concurrency, self.limits.requests_per_minute
        if most is not None and self.running >= (most if self.slice.slots is None else self.slice.slots):
            self._turned_away += 1
            return Refusal(Limit.CONCURRENCY, most, SLOT_RETRY_S)
        self._asked_requests += 1
        if self._requests is not None and a_minute is not None:
            wait = self._requests.wait_s(1, now)
            if wait > 0:
                return Refusal(Limit.REQUESTS, a_minute, min(wait, MINUTE_S) if self.slice is not WHOLE else wait)
        return None

    def begin(self, now: float) -> None:
        """A request begins; ``end`` follows."""
        self.running += 1
        self._most_running = max(self._most_running, self.running)
        if self._requests is not None:
            self._requests.spend(1, now)

    def token_refusal(self, tokens: float, now: float) -> Refusal | None:
        """Why so many tokens may not be used now."""
        a_minute = self.limits.tokens_per_minute
        if self._tokens is None or a_minute is None:
            return None
        self._asked_tokens += tokens
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

    def left(self, now: float) -> dict[Limit, Left]:
        """What of the two rates may be used at once now."""
        rates = (
            (Limit.REQUESTS, self.limits.requests_per_minute, self._requests),
            (Limit.TOKENS, self.limits.tokens_per_minute, self._tokens),
        )
        return {
            limit: Left(value, int(bucket.holds(now)), bucket.full_in_s(now))
            for limit, value, bucket in rates
            if bucket is not None and value is not None
        }

    def unused(self, now: float) -> bool:
        """Whether it could be forgotten and begun anew without a difference."""
        return not self.running and all(one is None or one.full(now) for one in (self._requests, self._tokens))

    def _change(self, limits: Limits, of: Slice, now: float) -> None:
        if limits == self.limits and of == self.slice:
            return
        self._requests = _changed(self._requests, limits.requests_per_minute, of.requests, now)
        self._tokens = _changed(self._tokens, limits.tokens_per_minute, of.tokens, now)
        self.limits, self.slice = limits, of


def _bucket(a_minute: int | None, share: float, now: float) -> TokenBucket | None:
    if a_minute is None:
        return None
    share = max(LEAST_SHARE, share)
    return TokenBucket(a_minute / MINUTE_S * share, _burst(a_minute) * share, now)


def _changed(bucket: TokenBucket | None, a_minute: int | None, share: float, now: float) -> TokenBucket | None:
    if bucket is None or a_minute is None:
        return _bucket(a_minute, share, now)
    share = max(LEAST_SHARE, share)
    bucket.change(a_minute / MINUTE_S * share, _burst(a_minute) * share, now)
    return bucket


def _burst(a_minute: int) -> float:
    return max(1.0, a_minute * BURST_S / MINUTE_S)
