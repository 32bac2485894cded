"""The file of engines read again while the gateway runs."""

from __future__ import annotations

from gateway.fleet.config import EngineConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.health import HealthWatch
from gateway.live import Change


def take(fleet: Fleet, health: HealthWatch, engines: tuple[EngineConfig, ...]) -> list[Change]:
    """Have these engines from now on; returns what that changes. Those that left finish what they have."""
    before = [engine.name for engine in fleet.engines if not engine.draining]
    changes = fleet.apply(engines)
    if not (changes.added or changes.removed):
        return []
    health.look_now()
    return [Change("--engines", ", ".join(before), ", ".join(config.name for config in engines))]
