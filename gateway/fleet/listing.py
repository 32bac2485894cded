"""Which engines the fleet has: those that the operator's file lists, and those in pods that it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gateway.config import ConfigError, GatewayConfig
from gateway.fleet import config as fleet_config
from gateway.fleet.config import DialectName, EngineConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.health import HealthWatch
from gateway.fleet.pods import PodWatch
from gateway.kubernetes_api import SERVICE_ACCOUNT, in_cluster_client
from gateway.live import Change

log = logging.getLogger(__name__)


class Listing:
    """Keeps ``fleet`` to what the file and the cluster say now. Raises ConfigError for pods that cannot be watched."""

    def __init__(self, config: Callable[[], GatewayConfig], fleet: Fleet, health: HealthWatch) -> None:
        """``fleet`` has what the file lists now."""
        self._config = config
        self._named = listed(config())
        self._fleet = fleet
        self._health = health
        self._pods = self._pod_watch(config())

    def start(self) -> None:
        """Begin to look for pods; there must be a running loop."""
        if self._pods is not None:
            self._pods.start()

    async def stop(self) -> None:
        """Look no more. Idempotent."""
        if self._pods is not None:
            await self._pods.stop()

    def reload(self) -> list[Change]:
        """Read the file again, and have what it says. Engines that left finish what they have. Raises ConfigError."""
        self._named = listed(self._config())
        return self._take()

    def _take(self) -> list[Change]:
        names = {engine.name for engine in self._named}
        found = () if self._pods is None else self._pods.found
        engines = (*self._named, *(engine for engine in found if engine.name not in names))
        before = [engine.name for engine in self._fleet.engines if not engine.draining]
        changes = self._fleet.apply(engines)
        if not (changes.added or changes.removed):
            return []
        self._health.look_now()
        return [Change("--engines", ", ".join(before), ", ".join(engine.name for engine in engines))]

    def _pod_watch(self, config: GatewayConfig) -> PodWatch | None:
        if config.engines_file is None:
            return None
        selectors = fleet_config.read_pods(config.engines_file, config.local_cluster)
        if not selectors:
            return None
        for selector in selectors:
            _check_needs(config, f"pods of {selector.labels}", selector.engine("pod", "127.0.0.1").dialect)
        return PodWatch(in_cluster_client(), SERVICE_ACCOUNT, selectors, lambda _: self._pods_changed())

    def _pods_changed(self) -> None:
        """What the file says by now waits for whoever has it read again."""
        for change in self._take():
            log.info("engines in pods changed from=%r to=%r", change.was, change.now)


def listed(config: GatewayConfig) -> tuple[EngineConfig, ...]:
    """Those that the operator's file lists. Raises ConfigError."""
    if config.engines_file is None:
        return ()
    engines = fleet_config.read(config.engines_file, config.local_cluster)
    for engine in engines:
        _check_needs(config, engine.name, engine.dialect)
    return engines


def _check_needs(config: GatewayConfig, name: str, dialect: DialectName) -> None:
    if dialect.splits and config.model_dir is None:
        raise ConfigError(
            f"--model: missing; {name} in --engines is of dialect {dialect}, for which prompts are tokenised here"
        )
