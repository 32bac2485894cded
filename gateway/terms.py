"""What operators say about clusters and keys: where each is, who trusts whom, what work costs, who may share what."""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from math import isfinite

import msgspec

from gateway.config import NAME
from gateway.errors import ApiError
from scheduler.admission.limits import Limits
from scheduler.facts import FREE, Prices

MAX_PRICE = 1e6
MAX_LIMIT = 1 << 40
MAX_WEIGHT = 1000.0
MAX_EXPIRY = 253402300799.0
"""The end of the year 9999."""
MAX_LISTED = 64
HOURS = 24
MAX_MODEL_CHARS = 128
_ENDPOINT = re.compile(r"[A-Za-z0-9._:/\[\]-]{1,253}")


class ClusterTerms(msgspec.Struct, frozen=True):
    """Of a cluster. ``region`` "" is not known, and then in none that a key names; ``trusted``: its operator is.

    ``residency`` are further names for where its data stays, which a key may name as well. ``endpoints`` are the hosts
    and networks (CIDR) at which its nodes may say that they are reached, () for any; ``models`` those that it may
    serve, () for any.
    """

    region: str = ""
    trusted: bool = False
    prices: Prices = FREE
    residency: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ApiError 400 naming the field that cannot be."""
        if self.region:
            check_name("region", self.region)
        for field in ("residency", "endpoints", "models"):
            listed = getattr(self, field)
            if len(listed) > MAX_LISTED:
                raise _bad(field, f"at most {MAX_LISTED}, got {len(listed)}")
        for one in self.residency:
            check_name("residency", one)
        for endpoint in self.endpoints:
            if not _ENDPOINT.fullmatch(endpoint) or not _is_network(endpoint):
                raise _bad("endpoints", f"{endpoint[:80]!r} is no host name, address or network such as 10.1.0.0/16")
        for model in self.models:
            if not 1 <= len(model) <= MAX_MODEL_CHARS or not model.isprintable():
                raise _bad("models", f"{model[:80]!r} must be 1 to {MAX_MODEL_CHARS} printable characters")
        for field in ("egress_per_gb", "prefill_per_s"):
            value = getattr(self.prices, field)
            if not (isfinite(value) and 0 <= value <= MAX_PRICE):
                raise _bad(f"prices.{field}", f"{value} is outside [0, {MAX_PRICE:g}]")
        hours = self.prices.by_hour
        if hours and (len(hours) != HOURS or not all(0 <= factor <= MAX_PRICE for factor in hours)):
            raise _bad("prices.by_hour", f"it takes {HOURS} factors from 0 up, one an hour of the day (UTC), or none")

    def reaches(self, host: str) -> bool:
        """Whether a node of this cluster may say that its KV port is at ``host``."""
        if not self.endpoints:
            return True
        try:
            address = ip_address(host.strip("[]"))
        except ValueError:
            return host.lower() in (endpoint.lower() for endpoint in self.endpoints)
        return any(address in network for endpoint in self.endpoints if (network := _network(endpoint)) is not None)


def _network(endpoint: str) -> IPv4Network | IPv6Network | None:
    """A network or a single address as one; None for a host name. Raises ValueError for a network that is none."""
    try:
        return ip_network(endpoint.strip("[]"))
    except ValueError:
        if "/" in endpoint:
            raise
        return None


def _is_network(endpoint: str) -> bool:
    try:
        return _network(endpoint) is not None or "/" not in endpoint
    except ValueError:
        return False


class KeyLimits(msgspec.Struct, frozen=True):
    """Of a key. ``tenant`` None: its holder is a tenant of its own. Caches are reused within a tenant.

    ``share_cache``: also with every other key that says so; then only trusted clusters see its prompts. ``regions`` are
    all that they may be in, None for all; ``barred`` clusters they may not reach. ``trusted_only``: no cluster that is
    not marked trusted. The next three are what its holder may use, None without a limit; tokens are those of prompts
    and answers. ``models`` are those that it may name, None for all; from ``expires`` (Unix seconds) on it is worth
    nothing, and so it is for generating once ``token_budget`` tokens are used in all.
    """

    tenant: str | None = None
    share_cache: bool = False
    regions: frozenset[str] | None = None
    barred: frozenset[str] = frozenset()
    trusted_only: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    models: frozenset[str] | None = None
    expires: float | None = None
    token_budget: int | None = None

    @property
    def rates(self) -> Limits:
        """What its holder may use."""
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)

    def check(self) -> None:
        """Raise ApiError 400 naming the field that cannot be."""
        _check_rates(self.rates)
        if self.tenant is not None:
            check_name("tenant", self.tenant)
        if self.token_budget is not None and not 1 <= self.token_budget <= MAX_LIMIT:
            raise _bad("token_budget", f"{self.token_budget} is outside [1, {MAX_LIMIT}]; leave it out for no budget")
        if self.expires is not None and not 0 < self.expires <= MAX_EXPIRY:
            raise _bad("expires", f"{self.expires} is no Unix time in (0, {MAX_EXPIRY:g}]; leave it out for none")
        for model in self.models or ():
            if not 1 <= len(model) <= MAX_MODEL_CHARS or not model.isprintable():
                raise _bad("models", f"{model[:80]!r} must be 1 to {MAX_MODEL_CHARS} printable characters")
        if len(self.models or ()) > MAX_LISTED:
            raise _bad("models", f"at most {MAX_LISTED} names, got {len(self.models or ())}")
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
