"""What operators say about clusters and keys: where each is, who trusts whom, what work costs, who may share what."""

from __future__ import annotations

from math import isfinite

import msgspec

from gateway.config import NAME
from gateway.errors import ApiError
from scheduler.admission.limits import Limits
from scheduler.facts import FREE, Prices

MAX_PRICE = 1e6
MAX_LIMIT = 1 << 40
MAX_WEIGHT = 1000.0
MAX_LISTED = 64
HOURS = 24


class ClusterTerms(msgspec.Struct, frozen=True):
    """Of a cluster. ``region`` "" is not known, and then in none that a key names; ``trusted``: its operator is."""

    region: str = ""
    trusted: bool = False
    prices: Prices = FREE

    def check(self) -> None:
        """Raise ApiError 400 naming the field that cannot be."""
        if self.region:
            check_name("region", self.region)
        for field in ("egress_per_gb", "prefill_per_s"):
            value = getattr(self.prices, field)
            if not (isfinite(value) and 0 <= value <= MAX_PRICE):
                raise _bad(f"prices.{field}", f"{value} is outside [0, {MAX_PRICE:g}]")
        hours = self.prices.by_hour
        if hours and (len(hours) != HOURS or not all(0 <= factor <= MAX_PRICE for factor in hours)):
            raise _bad("prices.by_hour", f"it takes {HOURS} factors from 0 up, one an hour of the day (UTC), or none")


class KeyLimits(msgspec.Struct, frozen=True):
    """Of a key. ``tenant`` None: its holder is a tenant of its own. Caches are reused within a tenant.

    ``share_cache``: also with every other key that says so; then only trusted clusters see its prompts. ``regions`` are
    all that they may be in, None for all; ``barred`` clusters they may not reach. ``trusted_only``: no cluster that is
    not marked trusted. The last three are what its holder may use, None without a limit; tokens are those of prompts
    and answers.
    """

    tenant: str | None = None
    share_cache: bool = False
    regions: frozenset[str] | None = None
    barred: frozenset[str] = frozenset()
    trusted_only: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    @property
    def rates(self) -> Limits:
        """What its holder may use."""
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)

    def check(self) -> None:
        """Raise ApiError 400 naming the field that cannot be."""
        _check_rates(self.rates)
        if self.tenant is not None:
            check_name("tenant", self.tenant)
        for field, listed in (("regions", self.regions or ()), ("barred", self.barred)):
            if len(listed) > MAX_LISTED:
                raise _bad(field, f"at most {MAX_LISTED} names, got {len(listed)}")
            for one in listed:
                check_name(field, one)
        if self.share_cache and self.tenant is not None:
            raise _bad(
                "share_cache", "a key that shares with all others has no tenant of its own; leave one of them out"
            )


class TenantTerms(msgspec.Struct, frozen=True):
    """Of a tenant: in a full queue it gets work in proportion to ``weight``; the rest is for all its keys together."""

    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    @property
    def rates(self) -> Limits:
        """What its keys may use together."""
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)

    def check(self) -> None:
        """Raise ApiError 400 naming the field that cannot be."""
        if not 1 / MAX_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise _bad("weight", f"{self.weight} is outside [{1 / MAX_WEIGHT:g}, {MAX_WEIGHT:g}]")
        _check_rates(self.rates)


def _check_rates(limits: Limits) -> None:
    for field, value in msgspec.structs.asdict(limits).items():
        if value is not None and not 1 <= value <= MAX_LIMIT:
            raise _bad(field, f"{value} is outside [1, {MAX_LIMIT}]; leave it out for no limit")


def check_name(field: str, value: str) -> None:
    """Raise ApiError 400 for what is no name of a region, a tenant or a cluster."""
    if not NAME.fullmatch(value):
        raise _bad(field, f"{value[:80]!r} must be 1 to 63 letters, digits, dots, dashes or underscores")


def _bad(field: str, message: str) -> ApiError:
    return ApiError(400, f"{field}: {message}", param=field)
