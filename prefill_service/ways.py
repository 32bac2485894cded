"""What carries the pieces of one transfer: of the transports that its order names, the first that works, then the next.

TCP is always there and needs no trying. It is where pieces go while something else is tried, and after the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvcache.transport import TCP, Connection, KvEndpoint, LaneFailed, Peer

log = logging.getLogger(__name__)


class Ways:
    """``ordered`` are transports by preference; those behind TCP are never tried."""

    def __init__(self, endpoint: Callable[[], KvEndpoint], ordered: Sequence[str]) -> None:
        self.transport = TCP
        """What carries the pieces now."""
        self.lanes: tuple[Connection, ...] | None = None
        """Its lanes; None where it is TCP."""
        self.failed: tuple[str, ...] = ()
        """What was tried in vain, or broke, in this order."""
        self._endpoint = endpoint
        self._left = list(ordered)

    async def next(self, peer: Peer) -> tuple[Connection, ...] | None:
        """The lanes of the first transport that is left and works; None for TCP."""
        while self._left and (transport := self._left.pop(0)) != TCP:
            try:
                lanes = await self._endpoint().lanes(peer, transport)
            except LaneFailed as error:
                log.info("no lane transport=%s cause=%s", transport, error)
                self.failed += (transport,)
            else:
                self.transport, self.lanes = transport, lanes
                return lanes
        self._left.clear()
        return None

    def lost(self, connection: Connection) -> bool:
        """A connection is gone: whether the last lane of the present transport went with it."""
        if self.lanes is None or connection not in self.lanes or any(lane.alive for lane in self.lanes):
            return False
        self.failed += (self.transport,)
        self.transport, self.lanes = TCP, None
        return True
