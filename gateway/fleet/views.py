"""What operators see of external engines: plain values for JSON."""

from __future__ import annotations

from typing import Any

from gateway.fleet.engine import Engine
from gateway.fleet.fleet import Fleet


def engine_view(engine: Engine, now: float) -> dict[str, Any]:
    """One engine; ``trouble`` is None while it is well."""
    config = engine.config
    return {
        "name": config.name,
        "url": config.url,
        "model": config.model,
        "role": config.role.value,
        "dialect": config.dialect.value,
        "cluster": config.cluster,
        "accepting": engine.accepting(now),
        "trouble": engine.trouble,
        "draining": engine.draining,
        "breaker": engine.breaker.state(now).value,
        "running": engine.running,
        "max_running": config.max_running,
        "ranks": config.ranks,
        "prefilling_tokens": engine.prefilling_tokens,
        "prefill_tokens_per_s": engine.speed.tokens_per_s,
    }


def fleet_view(fleet: Fleet, now: float) -> list[dict[str, Any]]:
    """All of them."""
    return [engine_view(engine, now) for engine in fleet.engines]
