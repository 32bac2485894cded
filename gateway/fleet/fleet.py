"""All external engines of a gateway: found by model, added, changed and removed while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.fleet.config import DialectName, EngineConfig, EngineRole
from gateway.fleet.engine import Engine
from scheduler.accuracy import TtftRatio
from scheduler.links import LinkState


@dataclass(frozen=True, slots=True)
class Changes:
    """What a new file changed, by the engines' names."""

    added: tuple[str, ...]
    removed: tuple[str, ...]


class Fleet:
    """Engines by name. One that the file no longer has gets no new work, and is forgotten once it has none."""

    def __init__(self, configs: Iterable[EngineConfig], local_cluster: str) -> None:
        self.local_cluster = local_cluster
        self._engines: dict[str, Engine] = {}
        self._leaving: list[Engine] = []
        self._splits = False
        self._links: dict[str, LinkState] = {}
        self._accuracy: dict[str, TtftRatio] = {}
        self.apply(configs)

    def apply(self, configs: Iterable[EngineConfig]) -> Changes:
        """Have these engines from now on. One that is as it was keeps all that is known of it."""
        wanted = {config.name: config for config in configs}
        kept = {name: one for name, one in self._engines.items() if wanted.get(name) == one.config}
        for name, engine in self._engines.items():
            if name not in kept:
                engine.draining = True
                self._leaving.append(engine)
        added = [name for name in wanted if name not in kept]
        removed = [name for name in self._engines if name not in wanted]
        self._engines = {name: kept.get(name) or Engine(config) for name, config in wanted.items()}
        self._splits = any(config.dialect.splits for config in wanted.values())
        return Changes(tuple(added), tuple(removed))

    @property
    def engines(self) -> list[Engine]:
        """Those of the file in its order, then those that still finish what they have."""
        self._leaving = [engine for engine in self._leaving if engine.running]
        return [*self._engines.values(), *self._leaving]

    @property
    def speakers(self) -> list[Engine]:
        """Those of the file that speak answers: all but prefill engines."""
        return [engine for engine in self._engines.values() if engine.config.role is not EngineRole.PREFILL]

    @property
    def splits(self) -> bool:
        """Whether any engine speaks a dialect that splits."""
        return self._splits

    @property
    def models(self) -> list[str]:
        """What clients may ask for, in the order of the file."""
        return list(dict.fromkeys(engine.config.model for engine in self._engines.values()))

    def engine(self, name: str) -> Engine | None:
        """The engine of that name in the file."""
        return self._engines.get(name)

    def of(self, model: str) -> list[Engine]:
        """The engines that serve a model, those that are not well included."""
        return [engine for engine in self._engines.values() if engine.config.model == model]

    def dialect(self, model: str) -> DialectName | None:
        """What all engines of a model speak; None for one that none serves."""
        return next((engine.config.dialect for engine in self.of(model)), None)

    def link(self, cluster: str) -> LinkState:
        """What is known of the way of KV from a cluster's engines to the decode engines here."""
        return self._links.setdefault(cluster, LinkState())

    def accuracy(self, cluster: str) -> TtftRatio:
        """How far predictions of a cluster's engines were off."""
        return self._accuracy.setdefault(cluster, TtftRatio())
