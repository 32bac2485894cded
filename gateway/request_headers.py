"""What a client says of its request in headers of ours, checked and named where it is wrong."""

from __future__ import annotations

import re
from collections.abc import Collection

from gateway.asgi import Scope, header
from gateway.errors import ApiError, bad_field
from gateway.keys import Principal
from kvcache.quality import Quality
from scheduler.facts import RouteHint

MEASURE = "x-prfaas-measure"
"""With the value 1: a request of ``prfaas profile``."""
ROUTE_HINT = "x-prfaas-route-hint"
QUALITY = "x-prfaas-kv-quality"
TTFT_SLO = "x-prfaas-ttft-slo"
SESSION = "x-session-id"
MOST_SLO_S = 86400.0
_SESSION = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def measures(scope: Scope) -> bool:
    """Whether this is no traffic but a measurement of the stack, which is to leave no trace in what is observed."""
    return header(scope, MEASURE.encode()) == "1"


def route_hint(scope: Scope, principal: Principal, clusters: Collection[str]) -> tuple[RouteHint, str | None]:
    """Where the client wants its prompt computed, and in which of these clusters. Raises ApiError."""
    value = header(scope, ROUTE_HINT.encode())
    if value is None:
        return RouteHint.NONE, None
    if not (principal.route_hint or measures(scope)):
        raise ApiError(
            403,
            "this key may not give route hints; create one with --route-hint",
            param=ROUTE_HINT,
            code="route_hint_forbidden",
        )
    if value in (RouteHint.LOCAL, RouteHint.REMOTE):
        return RouteHint(value), None
    if value not in clusters:
        raise bad_field(ROUTE_HINT, f"{ROUTE_HINT} must be local, remote or the name of a registered cluster")
    return RouteHint.CLUSTER, value


def quality(scope: Scope) -> Quality:
    """How inexact the request lets its KV become; exact unless it says otherwise. Raises ApiError."""
    value = header(scope, QUALITY.encode())
    try:
        return Quality.EXACT if value is None else Quality(value)
    except ValueError:
        raise bad_field(QUALITY, f"{QUALITY} must be one of {', '.join(Quality)}") from None


def ttft_slo(scope: Scope) -> float | None:
    """Seconds within which the client wants its first token. Raises ApiError."""
    value = header(scope, TTFT_SLO.encode())
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_SLO_S:
        raise bad_field(TTFT_SLO, f"{TTFT_SLO} must be seconds in (0, {MOST_SLO_S:g}], got {value[:40]!r}")
    return seconds


def session(scope: Scope) -> str | None:
    """What the client calls the conversation that this request goes on with. Raises ApiError."""
    value = header(scope, SESSION.encode())
    if value is not None and not _SESSION.fullmatch(value):
        raise bad_field(SESSION, f"{SESSION} must be 1 to 128 letters, digits, dots, dashes, colons or underscores")
    return value
