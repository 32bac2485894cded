"""A link cut to a twentieth and mended, as a link's state sees it from what its sender reports, in use and idle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.links import path_report
from kvcache.control import KvAddress
from kvcache.transport import KvEndpoint, Peer
from scheduler.links import LinkState
from tests.kvcache.kvnet import Recorder, data, local, send_data, soon, until, who
from tests.wan.direction import LinkSettings
from tests.wan.link import Wan

pytestmark = pytest.mark.slow

FULL, CUT = LinkSettings(rate_bps=1e9), LinkSettings(rate_bps=50e6)
BEAT_S = 1.0
SEEN_S = 5.0
MIDDLE_MBPS = 224
"""The geometric mean of the two rates."""
PIECE, BURST = 1 << 20, 8
"""A burst of 8 MiB a second is a twelfth of the full link, and more than the cut one can carry."""


class Sender:
    """A node at the near end, and a link's state that hears of it and has it probe, as at a gateway."""

    def __init__(self, endpoint: KvEndpoint, peer: Peer) -> None:
        self.link = LinkState()
        self.sent = 0
        self._beat_due = asyncio.Event()
        self._endpoint = endpoint
        self._peer = peer

    @property
    def mbps(self) -> float:
        return (self.link.bytes_per_s or 0.0) * 8 / 1e6

    async def beat(self, sends: bool) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            [report] = self._endpoint.links()
            self.link.reported("near", {"far": path_report(report)}, now)
            self.link.wanted(now)
            nbytes = self.link.probe_due(now)
            if nbytes:
                self.link.probed(nbytes, now)
                self._endpoint.probe("far", nbytes, self._beat_due.set)
            if sends:
                self.link.started(BURST * PIECE)
                for _ in range(BURST):
                    await send_data(self._peer, data(self.sent, PIECE), [bytes(PIECE)])
                    self.sent += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(now + BEAT_S):
                    await self._beat_due.wait()
            self._beat_due.clear()
            if sends:
                self.link.ended(BURST * PIECE)


@contextlib.asynccontextmanager
async def sending(wan: Wan, sends: bool) -> AsyncIterator[Sender]:
    receiver = Recorder()
    receiver.target = lambda peer, data: None
    near = KvEndpoint(local("near"), Recorder(), trusted_network=True)
    far = KvEndpoint(local("far"), receiver, trusted_network=True)
    with wan.far.entered():
        port = await far.listen(wan.far.address, 0)
    with wan.near.entered():
        peer = await near.peer(who("far"), KvAddress(wan.far.address, port), soon())
        await until(lambda: len(peer.connections) == 4)
    sender = Sender(near, peer)
    sender.link.observe(125_000_000, 1.0, 1.0, asyncio.get_running_loop().time())
    beating = asyncio.create_task(sender.beat(sends))
    try:
        yield sender
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await near.close()
        await far.close()


@pytest.mark.parametrize("sends", [True, False], ids=["in use", "idle"])
async def test_a_cut_and_its_end_are_seen_within_5_s(wan_of: Callable[[LinkSettings], Wan], sends: bool) -> None:
    wan = wan_of(FULL)
    async with sending(wan, sends) as sender:
        await asyncio.sleep(2 * BEAT_S)
        assert sender.mbps > 500
        wan.change(CUT)
        await until(lambda: sender.mbps < MIDDLE_MBPS, SEEN_S)
        await asyncio.sleep(2 * BEAT_S)
        assert sender.mbps < 120
        wan.change(FULL)
        await until(lambda: sender.mbps > MIDDLE_MBPS, SEEN_S)
