"""What the page shows, in one answer: clusters and ways, stages, recent traffic, proposals, as far as a caller may see.

What a caller may not see is not in the answer: a key that is bound to clusters gets those and their nodes, and only a
planner or operator of all clusters gets traffic, stages and proposals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import log2
from statistics import median
from typing import Any

import msgspec

from gateway.answers import sees
from gateway.keys import Principal, Role
from gateway.uncached import KeptDecision, uncached_at_home

RECENT = 300
"""Requests, the newest, that routes and lengths are told of."""
RECENT_S = 600.0
_NODE = ("node_id", "cluster", "role", "becoming", "accepting", "breaker", "jobs", "free_slots", "queued_tokens")
_CLUSTER = (
    *("name", "local", "state", "region", "trusted", "dial", "egress_gbps", "nodes", "accepting", "link", "breaker"),
    *("audits", "ttft_ratio"),
)


def sees_all(principal: Principal) -> bool:
    """Whether a caller may see what concerns the installation as a whole."""
    return principal.may(Role.OPERATOR, Role.PLANNER) and (principal.clusters is None or principal.role is Role.ADMIN)


def overview(
    principal: Principal,
    status: Mapping[str, Any],
    proposals: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    now: float,
) -> dict[str, Any]:
    """The answer to ``principal``, made of ``/v1/status``, ``/v1/plans/proposals`` and decision records, newest first.

    ``now`` is wall clock.
    """
    who = {
        "name": principal.name,
        "role": principal.role.value,
        "clusters": None if principal.clusters is None else sorted(principal.clusters),
        "all": sees_all(principal),
        "approves": principal.may(Role.OPERATOR) and sees_all(principal),
        "reports": principal.may(Role.PLANNER) and sees_all(principal),
    }
    found: dict[str, Any] = {
        "who": who,
        "time": now,
        "ready": status["ready"],
        "reason": status["reason"],
        "model": None if status["model"] is None else status["model"].id,
    }
    if not principal.may(Role.OPERATOR, Role.PLANNER):
        return found
    found["clusters"] = [_some(one, _CLUSTER) for one in status["clusters"] if sees(principal, one["name"])]
    found["nodes"] = [_node(one) for one in status["nodes"] if sees(principal, one["cluster"])]
    if not sees_all(principal):
        return found
    recent = [record for record in records[:RECENT] if record["at"] >= now - RECENT_S]
    return found | {
        "threshold_tokens": status["threshold_tokens"],
        "fallback": status["fallback"],
        "queue": {name: status["queue"][name] for name in ("waiting", "queue")},
        "traffic": _traffic(recent, now),
        "lengths": _lengths(recent),
        "assessment": proposals["assessment"],
        "mode": proposals["mode"],
        "proposals": list(proposals["proposals"])[:5],
        "requests": [_request(record) for record in recent[:20]],
    }


def _some(whole: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: whole.get(name) for name in names}


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    beat = node["heartbeat"] or {}
    pages = {name: beat.get(name) for name in ("pages_total", "pages_free", "pages_cached", "detail")}
    return _some(node, _NODE) | {"prefill_tokens_per_s": node["prefill_tokens_per_s"]} | pages


def _traffic(recent: Sequence[Mapping[str, Any]], now: float) -> dict[str, Any]:
    """Rate, and by route how many requests, the median time to first token and the KV on the wire."""
    routes: dict[str, dict[str, Any]] = {}
    for record in recent:
        route = routes.setdefault(record["route"] or "refused", {"requests": 0, "ttfts": [], "wire_bytes": 0})
        route["requests"] += 1
        if record["ttft_s"] is not None:
            route["ttfts"].append(record["ttft_s"])
        route["wire_bytes"] += sum(attempt.get("wire_bytes") or 0 for attempt in record["attempts"])
    for route in routes.values():
        ttfts = route.pop("ttfts")
        route["ttft_s"] = median(ttfts) if ttfts else None
    span = max(now - min((record["at"] for record in recent), default=now), 1.0)
    return {"requests": len(recent), "seconds": span, "per_s": len(recent) / span, "routes": routes}


def _lengths(recent: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """How many prompts have so many uncached tokens, in bins of half an octave: [low, high) and the count."""
    counts = Counter(int(2 * log2(max(tokens, 1))) for tokens in _uncached(recent))
    if not counts:
        return []
    bins = range(min(counts), max(counts) + 1)
    return [{"low": round(2 ** (n / 2)), "high": round(2 ** ((n + 1) / 2)), "count": counts[n]} for n in bins]


def _uncached(records: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    """Of those that a decision was made about; what another version wrote, and does not fit, is left out."""
    for record in records:
        with suppress(msgspec.ValidationError):
            yield uncached_at_home(msgspec.convert(record["decision"], KeptDecision).facts)


def _request(record: Mapping[str, Any]) -> dict[str, Any]:
    decision = record["decision"]
    reason = None if decision is None else decision["reason"]
    tokens = None if record["usage"] is None else record["usage"].get("prompt_tokens")
    plain = _some(record, ("request_id", "at", "route", "outcome", "ttft_s"))
    return plain | {"reason": reason, "prompt_tokens": tokens}
