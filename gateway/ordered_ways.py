"""What may carry one transfer inside a cluster, as it was ordered, and where it is learnt what did."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import Counter

from kvcache.control import TransferDone
from scheduler.topology.paths import Endpoint, Transport
from scheduler.topology.routes import Routes


class OrderedWays:
    """``routes`` are those of the cluster that both ``ends`` are in; None where they are not in one."""

    def __init__(
        self, transports: tuple[str, ...], routes: Routes | None, ends: tuple[str, str], counter: Counter
    ) -> None:
        self.transports = transports
        """In the order in which the nodes try them; () for TCP alone."""
        self._routes = routes
        self._ends = Endpoint(ends[0]), Endpoint(ends[1])
        self._counter = counter

    def took(self, done: TransferDone) -> dict[str, Any]:
        """A transfer went well; what a decision record keeps of it. What nobody ordered is not learnt from.

        It took what was left to send when all was computed as long as that was waited for. ``hidden`` is the share that
        had passed by then.
        """
        now, ordered = time.monotonic(), self.transports or (Transport.TCP.value,)
        failed = [name for name in dict.fromkeys(done.failed_transports) if name in ordered]
        for name in failed:
            self._failed(name, now)
        known = done.transport in ordered
        self._counter.labels(done.transport if known else "other", "carried").inc()
        left = done.wire_bytes * done.backlog_bytes // done.raw_bytes
        if known and self._routes is not None:
            self._routes.took(*self._ends, Transport(done.transport), left, done.exposed_s, now)
        figures: dict[str, Any] = {
            "transport": done.transport if known else "other",
            "transports_ordered": list(ordered),
            "transports_failed": failed,
        }
        if done.backlog_bytes:  # the last piece at least, but for nodes that do not say
            figures["hidden"] = 1 - done.backlog_bytes / done.raw_bytes
        return figures

    def corrupted(self) -> None:
        """What arrived was not what was sent: whatever carried it was most likely the first of its order."""
        if self.transports:
            self._failed(self.transports[0], time.monotonic())

    def _failed(self, name: str, now: float) -> None:
        self._counter.labels(name, "failed").inc()
        if self._routes is not None:
            self._routes.failed(*self._ends, Transport(name), now)
