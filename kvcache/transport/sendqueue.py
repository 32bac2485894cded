"""What is waiting to be sent to one peer, and in which order. Sans-I/O.

Control frames go first. Data frames take turns, one for each transfer, so that a large transfer does not hold up a
small one; the frames of one transfer keep their order. Once part of a frame is sent the rest of it must follow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

BATCH_BYTES = 256 << 10


@dataclass(slots=True, eq=False)
class Outgoing:
    """One frame: its bytes still to be sent, and who waits until its memory is free (None: a control frame)."""

    views: deque[memoryview]
    nbytes: int
    transfer: bytes = b""
    waiter: asyncio.Future[None] | None = None


class SendQueue:
    """Frames of one peer. ``gather`` shows the next bytes, ``sent`` takes them off."""

    def __init__(self) -> None:
        self.control_bytes = 0
        """Bytes of control frames that are not wholly sent."""
        self._control: deque[Outgoing] = deque()
        self._waiting: dict[bytes, deque[Outgoing]] = {}
        self._turns: deque[bytes] = deque()
        self._batch: deque[Outgoing] = deque()
        self._batch_bytes = 0
        self._midway = False

    @property
    def between_frames(self) -> bool:
        """Whether the last byte sent ended a frame."""
        return not self._midway

    def push_control(self, frame: bytes) -> None:
        """Queue an encoded control frame."""
        self.control_bytes += len(frame)
        self._control.append(Outgoing(deque([memoryview(frame)]), len(frame)))

    def push_data(
        self, transfer: bytes, head: bytes, payload: Sequence[memoryview], waiter: asyncio.Future[None]
    ) -> Outgoing:
        """Queue a Data frame; ``payload`` is referred to until the frame is returned by ``sent`` or dropped."""
        views = deque([memoryview(head), *(view for view in payload if view)])
        item = Outgoing(views, sum(map(len, views)), transfer, waiter)
        queue = self._waiting.get(transfer)
        if queue is None:
            self._waiting[transfer] = deque([item])
            self._turns.append(transfer)
        else:
            queue.append(item)
        return item

    def gather(self) -> list[memoryview]:
        """The next bytes to send, in order; empty when there are none. Repeats itself until ``sent`` is called."""
        while self._batch_bytes < BATCH_BYTES:
            item = self._control.popleft() if self._control else self._next_data()
            if item is None:
                break
            self._batch.append(item)
            self._batch_bytes += item.nbytes
        return [view for item in self._batch for view in item.views]

    def sent(self, nbytes: int) -> list[Outgoing]:
        """The first ``nbytes`` of what ``gather`` showed are sent; returns the data frames that are finished."""
        finished: list[Outgoing] = []
        self._batch_bytes -= nbytes
        while nbytes:
            item = self._batch[0]
            if item.waiter is None and item.transfer == b"":
                self.control_bytes -= min(nbytes, item.nbytes)
            if nbytes < item.nbytes:
                _advance(item, nbytes)
                self._midway = True
                return finished
            nbytes -= item.nbytes
            self._batch.popleft()
            self._midway = False
            if item.waiter is not None:
                item.views.clear()
                finished.append(item)
        return finished

    def drop(self, item: Outgoing) -> None:
        """Nobody waits for ``item`` any more: let go of its memory.

        A frame that may have been begun goes on with a copy of what is left of it.
        """
        item.waiter = None
        queue = self._waiting.get(item.transfer)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._waiting[item.transfer]
                self._turns.remove(item.transfer)
            item.views.clear()
        elif item.views:
            item.views = deque([memoryview(b"".join(item.views))])

    def clear(self) -> list[Outgoing]:
        """Drop everything; returns the data frames that somebody waits for."""
        items = [*self._batch, *(item for queue in self._waiting.values() for item in queue)]
        self._control.clear()
        self._waiting.clear()
        self._turns.clear()
        self._batch.clear()
        self._batch_bytes = self.control_bytes = 0
        for item in items:
            item.views.clear()
        return [item for item in items if item.waiter is not None]

    def _next_data(self) -> Outgoing | None:
        if not self._turns:
            return None
        transfer = self._turns.popleft()
        queue = self._waiting[transfer]
        item = queue.popleft()
        if queue:
            self._turns.append(transfer)
        else:
            del self._waiting[transfer]
        return item


def _advance(item: Outgoing, nbytes: int) -> None:
    """Take ``nbytes``, less than it holds, off the front of ``item``."""
    item.nbytes -= nbytes
    while nbytes:
        view = item.views.popleft()
        if nbytes < len(view):
            item.views.appendleft(view[nbytes:])
            return
        nbytes -= len(view)
