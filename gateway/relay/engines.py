"""Which engine takes a request whole, and the beginning of what it is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from gateway.fleet.config import EngineConfig
from gateway.fleet.engine import Engine
from gateway.upstream.head import Origin, request_head, split_url

_MOST_KEPT = 16384


def pick(engines: Iterable[Engine], may: Callable[[Engine], bool], tried: Collection[str], now: float) -> Engine | None:
    """The least busy, for its size, of those that may take a request; None if none may.

    One that was ``tried`` only where no other may. Of equals the one that was used least.
    """
    best: Engine | None = None
    least = (0.0, 0)
    for engine in engines:
        if not engine.free_slots or not engine.accepting(now) or not may(engine):
            continue
        load = engine.running / engine.config.max_running + (engine.name in tried), engine.used
        if best is None or load < least:
            best, least = engine, load
    return best


class Heads:
    """Request line, host and the engine's own key: the same in every head for one path of an engine."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[EngineConfig, Origin, bytes]] = {}

    def head(self, engine: EngineConfig, path: str, lines: bytes, body_bytes: int) -> tuple[Origin, bytes]:
        """Where to connect, and a request's head; ``lines`` are header lines that a parser has let pass."""
        found = self._kept.get((engine.name, path))
        if found is None or found[0] is not engine:
            if len(self._kept) >= _MOST_KEPT:  # engines that were removed from the file long ago
                self._kept.clear()
            found = self._kept[engine.name, path] = engine, *_beginning(engine, path)
        _, origin, beginning = found
        return origin, b"%s%scontent-length: %d\r\n\r\n" % (beginning, lines, body_bytes)


def _beginning(engine: EngineConfig, path: str) -> tuple[Origin, bytes]:
    origin, _ = split_url(engine.url)
    own = () if engine.key is None else ((b"authorization", b"Bearer " + engine.key.encode()),)
    whole = request_head("POST", origin, path, own, 0)
    return origin, whole.removesuffix(b"content-length: 0\r\n\r\n")
