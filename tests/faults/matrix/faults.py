"""The faults, by name: how each strikes, how it is mended, and what clients may meet meanwhile beside clear errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGSTOP

from tests.faults.matrix.outcome import Kind
from tests.faults.matrix.scene import DECODERS, HOME, LINK_BYTES_PER_S, REMOTE, Scene
from tests.redis_server import RedisServer


@dataclass(frozen=True, slots=True)
class Fault:
    """``strike`` and ``mend`` return when it is done. ``leaving`` is the share of clients that go away."""

    name: str
    strike: Callable[[Scene], None]
    mend: Callable[[Scene], None]
    for_s: float = 4.0
    leaving: float = 0.0
    allowed: frozenset[Kind] = frozenset({Kind.ANSWER, Kind.ERROR, Kind.LEFT})
    possible: Callable[[Scene], bool] = lambda scene: True
    moves_clock: bool = False


def _nothing(scene: Scene) -> None:
    """For faults that are in the load itself."""


def _killed(name: str) -> Fault:
    return Fault(f"kill-{name}", lambda scene: scene.kill(name), lambda scene: scene.restart(name))


def _frozen(name: str) -> Fault:
    return Fault(f"stop-{name}", lambda scene: scene.freeze(name), lambda scene: scene.thaw(name), for_s=7.0)


def _restarted_on_a_full_disk(scene: Scene) -> None:
    scene.fill_disk()
    scene.kill("gateway")
    scene.restart_gateway()


def _redis(scene: Scene) -> RedisServer:
    assert scene.redis is not None
    return scene.redis


def _has_redis(scene: Scene) -> bool:
    return scene.redis is not None


def _clock_jumps(scene: Scene) -> None:
    """Ten minutes ahead, then ten behind; the second half of the time it is a little off only."""
    for offset in (600.0, -600.0, 30.0):
        scene.move_clock(offset)
        time.sleep(2.5)


_WITHOUT_GATEWAY = frozenset({Kind.ANSWER, Kind.ERROR, Kind.LEFT, Kind.UNREACHABLE})
FAULTS = (
    Fault("disconnects", _nothing, _nothing, for_s=8.0, leaving=0.6),
    _killed(REMOTE),
    _killed(HOME),
    _killed(DECODERS[0]),
    Fault("kill-engine", lambda scene: scene.signal_engine(HOME, SIGKILL), _nothing, for_s=6.0),
    Fault(
        "stop-engine",
        lambda scene: scene.signal_engine(REMOTE, SIGSTOP),
        lambda scene: scene.signal_engine(REMOTE, SIGCONT),
        for_s=8.0,
    ),
    _frozen(REMOTE),
    _frozen(HOME),
    _frozen(DECODERS[1]),
    _frozen("gateway"),
    Fault("link-cut", lambda scene: scene.proxy.cut(), lambda scene: scene.proxy.heal(), for_s=7.0),
    Fault(
        "link-slow",
        lambda scene: scene.proxy.pace(20_000),
        lambda scene: scene.proxy.pace(LINK_BYTES_PER_S),
        for_s=6.0,
    ),
    Fault("disk-full", lambda scene: scene.fill_disk(), lambda scene: scene.free_disk()),
    Fault("clock-jump", _clock_jumps, lambda scene: scene.move_clock(0), 1.0, moves_clock=True),
    Fault("kill-redis", lambda scene: _redis(scene).kill(), lambda scene: _redis(scene).restart(), possible=_has_redis),
    Fault("stop-redis", lambda scene: _redis(scene).stall(), lambda scene: _redis(scene).go_on(), possible=_has_redis),
    Fault(
        "kill-gateway",
        lambda scene: scene.kill("gateway"),
        lambda scene: scene.restart_gateway(),
        for_s=2.0,
        allowed=_WITHOUT_GATEWAY,
    ),
    Fault("restart-disk-full", _restarted_on_a_full_disk, lambda scene: scene.free_disk(), allowed=_WITHOUT_GATEWAY),
)
