"""Whether this gateway can serve, and what keeps it from that, in words for whoever operates it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.canary import Canary
from gateway.fleet.fleet import Fleet
from gateway.joining.refusals import LATELY_S, Refusals
from gateway.registry import Registry
from kvcache.wire import Role


class Readiness:
    """Of all that speaks answers: decode nodes at home, and external engines. ``leaving``: it was told to stop."""

    def __init__(
        self,
        registry: Registry,
        fleet: Fleet,
        canary: Canary,
        refusals: Refusals,
        leaving: Callable[[], bool],
    ) -> None:
        self._registry = registry
        self._fleet = fleet
        self._canary = canary
        self._refusals = refusals
        self._leaving = leaving

    def missing(self) -> str | None:
        """What keeps this gateway from serving, or None."""
        if self._leaving():
            return "shutting down"
        if any(node.accepting for node in self._registry.nodes(self._registry.local_cluster, Role.DECODE)):
            return self._canary.missing_proof()
        now = asyncio.get_running_loop().time()
        if any(engine.accepting(now) for engine in self._fleet.speakers):
            return None
        return f"no decode node accepts work{self._turned_away()}"

    def _turned_away(self) -> str:
        """How many nodes would be here and may not, and why: in our words alone, as anybody reads it."""
        causes = self._refusals.lately({node.node_id for node in self._registry.nodes()})
        if not causes:
            return ""
        count = sum(causes.values())
        word = "1 node was" if count == 1 else f"{count} nodes were"
        each = ", ".join(f"{cause} ({number})" for cause, number in sorted(causes.items()))
        return f"; in the last {LATELY_S // 60:g} minutes {word} turned away: {each}"


def has_room(registry: Registry, fleet: Fleet) -> bool:
    """Whether any answer more can be spoken."""
    nodes = registry.nodes(registry.local_cluster, Role.DECODE)
    if any(node.free_slots > 0 for node in nodes if node.accepting):
        return True
    now = asyncio.get_running_loop().time()
    return any(engine.free_slots and engine.accepting(now) for engine in fleet.speakers)
