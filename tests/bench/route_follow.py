"""A way that turns slow loses its place, and regains it: ``python -m tests.bench.route_follow``.

Two processes of this machine, its own interconnect graph, and real transfers that follow the routes as a gateway has
them followed. After a while shared memory is read slowly, as by a process that does not get to it; then no more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvcache.topology import MachineReport
from kvcache.transport.hostring import RingChannel
from node.topology.discover import discover
from node.topology.machine import ThisMachine
from scheduler.topology.graph import Interconnect
from scheduler.topology.paths import Endpoint, Transport
from scheduler.topology.routes import Routes
from tests.bench.transport_pair import TransportPair, transport_pair

SLOW_BYTES_PER_S = 50e6
MOST_AFTER_S = 240.0


@dataclass(frozen=True)
class Step:
    """One transfer: what it was told to try, and what it took."""

    at_s: float
    slow: bool
    transport: str
    took_s: float
    shm_cost_s: float
    tcp_cost_s: float


class Reading:
    """How fast this process reads what comes through shared memory; 0 for as fast as it can."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        receive = RingChannel.receive

        def slowly(channel: RingChannel, buffers: Sequence[memoryview]) -> int | None:
            count = receive(channel, buffers)
            if count and self.bytes_per_s:
                time.sleep(count / self.bytes_per_s)
            return count

        RingChannel.receive = slowly  # type: ignore[method-assign]


class Followed:
    """Routes over this machine's graph, and the two ends of every transfer."""

    def __init__(self, pair: TransportPair, report: MachineReport) -> None:
        graph = Interconnect()
        self._ends = Endpoint("serving"), Endpoint("fetching")
        for end in self._ends:
            graph.tell(end.node_id, report)
        self._routes = Routes(graph)
        self._pair = pair
        self._began = time.monotonic()

    async def transfer(self, slow: bool) -> Step:
        offered = (Transport.SHM, Transport.TCP)
        route = self._routes.choose(*self._ends, self._pair.nbytes, time.monotonic(), offered)
        costs = {cost.path.transport: cost.seconds for cost in route.costs}
        done = (await self._pair.fetch(route.transport.value)).report
        now = time.monotonic()
        self._routes.took(*self._ends, route.transport, done.backlog_bytes, done.exposed_s, now)
        chosen = route.transport.value
        return Step(now - self._began, slow, chosen, done.exposed_s, costs[Transport.SHM], costs[Transport.TCP])


async def run(nbytes: int) -> list[Step]:
    """Ten transfers as they are, ten with slow reading, then as many as it takes to be back for five in a row."""
    reading, steps = Reading(), list[Step]()
    report = await asyncio.to_thread(discover, ThisMachine(), {})
    async with transport_pair(("tcp", "shm"), nbytes) as pair:
        followed = Followed(pair, report)
        for slow in (False, True):
            reading.bytes_per_s = SLOW_BYTES_PER_S if slow else 0.0
            steps += [await followed.transfer(slow) for _ in range(10)]
        reading.bytes_per_s, recovered = 0.0, time.monotonic()
        while time.monotonic() < recovered + MOST_AFTER_S:
            await asyncio.sleep(2.0)
            steps.append(await followed.transfer(False))
            if [step.transport for step in steps[-3:]] == ["shm"] * 3 and not any(step.slow for step in steps[-3:]):
                break
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=32 << 20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps = asyncio.run(run(options.bytes))
    if options.json:
        print(json.dumps([asdict(step) for step in steps], indent=2))
        return
    for step in steps:
        print(
            f"{step.at_s:6.1f} s {'slow' if step.slow else '    '} {step.transport}: {step.took_s * 1e3:7.1f} ms; "
            f"cost shm {step.shm_cost_s * 1e3:7.1f} ms, tcp {step.tcp_cost_s * 1e3:7.1f} ms"
        )


if __name__ == "__main__":
    main()
