"""A worker leaves the shared port: whoever waits in the queue of its listener is taken in first.

The kernel spreads connections over the listeners of a port as they come, and resets those in the queue of one that is
closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

SETTLE_S = 0.05
"""Until the event loop has let go of a listener: nobody but who leaves takes from its queue then."""


async def leave_shared(server: asyncio.Server, take: Callable[[socket.socket], Awaitable[object]]) -> None:
    """Close a server with one listener; ``take`` serves a connection that was accepted."""
    with socket.socket(fileno=os.dup(server.sockets[0].fileno())) as queue:
        server.close()
        await asyncio.sleep(SETTLE_S)
        queue.setblocking(False)
        waiting = _emptied(queue)
    await asyncio.gather(*map(take, waiting), return_exceptions=True)


def _emptied(queue: socket.socket) -> list[socket.socket]:
    """All that wait; between the last look and the end of the listener there is nothing else."""
    found = []
    while True:
        try:
            found.append(queue.accept()[0])
        except OSError:  # nobody waits any more, or there are no more files to be had
            return found
