"""What operators say about clusters and keys: where each is, who trusts whom, what work costs, who may share what."""

from __future__ import annotations

from math import isfinite

import msgspec

from gateway.config import NAME
from gateway.errors import ApiError
from scheduler.facts import FREE, Prices

MAX_PRICE = 1e6
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
            _name("region", self.region)
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
    not marked trusted.
    """

    tenant: str | None = None
    share_cache: bool = False
    regions: frozenset[str] | None = None
    barred: frozenset[str] = frozenset()
    trusted_only: bool = False

    def check(self) -> None:
        """Raise ApiError 400 naming the field that cannot be."""
        if self.tenant is not None:
            _name("tenant", self.tenant)
        for field, listed in (("regions", self.regions or ()), ("barred", self.barred)):
            if len(listed) > MAX_LISTED:
                raise _bad(field, f"at most {MAX_LISTED} names, got {len(listed)}")
            for one in listed:
                _name(field, one)
        if self.share_cache and self.tenant is not None:
            raise _bad(
                "share_cache", "a key that shares with all others has no tenant of its own; leave one of them out"
            )


def _name(field: str, value: str) -> None:
    if not NAME.fullmatch(value):
        raise _bad(field, f"{value[:80]!r} must be 1 to 63 letters, digits, dots, dashes or underscores")


def _bad(field: str, message: str) -> ApiError:
    return ApiError(400, f"{field}: {message}", param=field)
