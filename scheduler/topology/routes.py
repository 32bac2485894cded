"""Which way a transfer takes: the one of least cost in seconds, as far as is known now.

Costs begin with what devices say and are corrected by what transfers took. A way is never forbidden: one that was slow
or failed costs more for a while, is tried again when that has faded, and is there when nothing else is.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler.topology.graph import Interconnect
from scheduler.topology.paths import Endpoint, Path, Transport

GAIN = 0.5
"""How much of what one transfer shows is believed at once."""
FADES_S = 30.0
"""In this time half of what was learnt of a way that nothing takes is forgotten, counted in decibels."""
FAILURE_S = 2.0
"""What the first failure of a way costs; each further one doubles it, up to ``MOST_FAILURE_S``."""
MOST_FAILURE_S = 64.0
MAX_WAYS = 1 << 16
_LEAST_BYTES = 1 << 20
"""Smaller transfers say more of their beginning than of the way."""
_MOST_RATIO = 1e4


class Cost(msgspec.Struct, frozen=True):
    """One way's cost: ``nominal_s`` by its devices, times ``slowdown`` as seen, plus what it failed lately."""

    path: Path
    nominal_s: float
    slowdown: float
    failures_s: float

    @property
    def seconds(self) -> float:
        """The whole cost."""
        return self.nominal_s * self.slowdown + self.failures_s


class Route(msgspec.Struct, frozen=True):
    """All ways of one transfer by cost, the chosen one first."""

    costs: tuple[Cost, ...]

    @property
    def transport(self) -> Transport:
        """The way that was chosen."""
        return self.costs[0].path.transport

    @property
    def seconds(self) -> float:
        """What it is expected to cost."""
        return self.costs[0].seconds


@dataclass(slots=True)
class _Seen:
    """What transfers have shown of one way: the logarithm of took over nominal, and a penalty; both fade."""

    at: float
    log_slowdown: float = 0.0
    failures_s: float = 0.0
    row: int = 0
    """Failures without a success between them."""

    def fade(self, now: float) -> None:
        kept = 0.5 ** (max(0.0, now - self.at) / FADES_S)
        self.log_slowdown *= kept
        self.failures_s *= kept
        self.at = max(self.at, now)


@dataclass(slots=True)
class Routes:
    """Routes over one interconnect. Times are seconds of one monotonic clock."""

    interconnect: Interconnect
    _seen: OrderedDict[tuple[Endpoint, Endpoint, Transport], _Seen] = field(default_factory=OrderedDict)

    def choose(
        self, a: Endpoint, b: Endpoint, nbytes: int, now: float, offered: Collection[Transport] = tuple(Transport)
    ) -> Route:
        """The ways of ``nbytes`` from ``a`` to ``b`` over transports that both ends have, the least cost first.

        Raises ValueError where none of ``offered`` connects them, and for an endpoint that its node does not have.
        """
        paths = [path for path in self.interconnect.paths(a, b) if path.transport in offered]
        if not paths:
            raise ValueError(f"offered: none of {', '.join(offered)} connects {a.node_id} and {b.node_id}")
        return Route(tuple(sorted((self._cost(a, b, path, nbytes, now) for path in paths), key=lambda c: c.seconds)))

    def took(self, a: Endpoint, b: Endpoint, transport: Transport, nbytes: int, seconds: float, now: float) -> None:
        """A transfer went well. Small ones, and ways that are not in the graph, say nothing."""
        path = self._path(a, b, transport)
        if path is None or nbytes < _LEAST_BYTES or not 0 < seconds < math.inf:
            return
        seen = self._of(a, b, transport, now)
        self._learn(seen, seconds / path.seconds(nbytes))
        seen.failures_s, seen.row = 0.0, 0

    def measured(self, a: Endpoint, b: Endpoint, transport: Transport, bytes_per_s: float, now: float) -> None:
        """What the way itself was seen to do, as a kernel tells it of its connections: told again and again."""
        path = self._path(a, b, transport)
        if path is None or not 0 < bytes_per_s < math.inf:
            return
        self._learn(self._of(a, b, transport, now), path.bytes_per_s / bytes_per_s)

    def failed(self, a: Endpoint, b: Endpoint, transport: Transport, now: float) -> None:
        """A transfer broke off: this way costs more for a while, the more the oftener it fails in a row."""
        if self._path(a, b, transport) is None:
            return
        seen = self._of(a, b, transport, now)
        seen.failures_s = min(MOST_FAILURE_S, FAILURE_S * 2.0 ** min(seen.row, 10))
        seen.row += 1

    def forget(self, node_id: str) -> None:
        """A node is gone: so is what was seen of its ways."""
        for key in [key for key in self._seen if node_id in (key[0].node_id, key[1].node_id)]:
            del self._seen[key]

    def _cost(self, a: Endpoint, b: Endpoint, path: Path, nbytes: int, now: float) -> Cost:
        seen = self._seen.get((a, b, path.transport))
        if seen is None:
            return Cost(path, path.seconds(nbytes), 1.0, 0.0)
        seen.fade(now)
        return Cost(path, path.seconds(nbytes), math.exp(seen.log_slowdown), seen.failures_s)

    def _learn(self, seen: _Seen, ratio: float) -> None:
        bounded = min(_MOST_RATIO, max(1 / _MOST_RATIO, ratio))
        seen.log_slowdown += GAIN * (math.log(bounded) - seen.log_slowdown)

    def _path(self, a: Endpoint, b: Endpoint, transport: Transport) -> Path | None:
        found: Sequence[Path] = self.interconnect.paths(a, b)
        return next((path for path in found if path.transport is transport), None)

    def _of(self, a: Endpoint, b: Endpoint, transport: Transport, now: float) -> _Seen:
        key = (a, b, transport)
        seen = self._seen.setdefault(key, _Seen(now))
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_WAYS:
            self._seen.popitem(last=False)
        seen.fade(now)
        return seen
