"""Whether a client reads what is written for it; one that reads nothing for long is cut off."""

from __future__ import annotations

import asyncio

UNREAD_S = 60.0
"""How long a client may read nothing of what waits for it; then its connection is closed."""


class Pace:
    """Of one connection, whatever is answered on it: an answer may be over long before it is read."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.full = False
        """Whether so much waits for the client that nothing should be added."""
        self._transport = transport
        self._loop = loop
        self._due: asyncio.TimerHandle | None = None

    def on_full(self) -> None:
        """Too much waits for the client."""
        self.full = True
        self._watch()

    def on_drained(self) -> None:
        """It reads."""
        self.full = False
        self.end()
        if self._transport.is_closing():
            self._watch()

    def close(self) -> None:
        """Close the connection behind what waits, which is not waited for without end."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._watch()

    def end(self) -> None:
        """The connection is gone, or somebody else's from now on. Idempotent."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _watch(self) -> None:
        if self._due is None:
            self._due = self._loop.call_later(UNREAD_S, self._transport.abort)
