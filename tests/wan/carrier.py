"""The process that carries packets between two TUN devices: ``python -m tests.wan.carrier CONTROL TUN TUN SETTINGS``.

Orders come over the socket CONTROL, one JSON object each: new settings, or null; each is answered with the counters
and the processor time so far. The process ends when the other end of that socket is closed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import sys
import time
from dataclasses import asdict

from tests.wan.direction import Direction, LinkSettings
from tests.wan.firewall import let_through

TICK_S = 0.0003
"""How long packets may wait to be looked at: looking at each at once would cost most of a core."""
BATCH = 512
MAX_PACKET = 16 << 10


def read_packets(tun: int) -> list[bytes]:
    """What lies ready, up to a batch."""
    packets = []
    with contextlib.suppress(BlockingIOError):
        while len(packets) < BATCH:
            packets.append(os.read(tun, MAX_PACKET))
    return packets


def answer(control: socket.socket, directions: tuple[Direction, Direction]) -> bool:
    """Obey one order; False where there will be no more."""
    order = control.recv(4096)
    if not order:
        return False
    settings = json.loads(order)
    if settings is not None:
        for direction in directions:
            direction.change(LinkSettings(**settings), time.monotonic())
    state = {"cpu_s": time.process_time(), "directions": [asdict(direction.counters) for direction in directions]}
    control.send(json.dumps(state).encode())
    return True


def carry(control: socket.socket, tuns: tuple[int, int], settings: LinkSettings) -> None:
    """Carry until ``control`` is closed."""
    there, back = Direction(settings, settings.seed), Direction(settings, settings.seed + 1)
    ways = (
        (there, tuns[0], tuns[1], lambda: there.settings.far_open),
        (back, tuns[1], tuns[0], lambda: back.settings.near_open),
    )
    looked = time.monotonic()
    while True:
        idle = there.idle and back.idle
        ready, _, _ = select.select([control, *tuns] if idle else [control], [], [], None if idle else TICK_S)
        if control in ready and not answer(control, (there, back)):
            return
        if idle:
            looked = time.monotonic()
        now = time.monotonic()
        for direction, source, target, opened in ways:
            packets = read_packets(source)
            if (ports := opened()) is not None:
                packets = let_through(packets, ports)
            if packets:
                direction.offer(packets, looked, now)
            for packet in direction.due(now):
                try:
                    os.write(target, packet)
                except OSError:  # the device takes no more: lost, as on any receiver
                    direction.counters.overflowed += 1
        looked = now


def main() -> None:
    """Become the carrier."""
    control = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(PermissionError):
        os.nice(-10)
    gc.freeze()
    gc.disable()
    with contextlib.suppress(KeyboardInterrupt):
        carry(control, (int(sys.argv[2]), int(sys.argv[3])), LinkSettings(**json.loads(sys.argv[4])))


if __name__ == "__main__":
    main()
