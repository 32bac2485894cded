"""What is waiting to be sent to one peer, and what one of its connections has taken from it. Sans-I/O.

Control frames go first, then Data frames in the order that ``SendOrder`` says; the frames of one transfer leave in the
order of their coming, though over different connections they may overtake each other. Once part of a frame is sent over
a connection the rest of it must follow there; if that connection is lost the frame goes back to the queue, whole.
A frame that may go over some connections ``only``, because it must not overtake what went there before, is lost with
the last of them. What measures an idle path goes last of all, and not at all once there is anything else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache.transport.order import SendOrder

if TYPE_CHECKING:
    from kvcache.transport.connection import Connection

BATCH_BYTES = 256 << 10


@dataclass(slots=True, eq=False)
class Outgoing:
    """One frame on its way. ``carrier`` is the connection that has taken all of it; its memory is free from then on.

    ``transfer`` is empty for a control frame. ``waiter`` is whoever waits for ``carrier``. A ``dropped`` frame is not
    sent again should its connection be lost. One that may go over ``only`` these connections is given up when none of
    them is left: its ``carrier`` is one that is not alive.
    """

    parts: tuple[memoryview, ...]
    nbytes: int
    transfer: bytes = b""
    carrier: Connection | None = None
    waiter: asyncio.Future[None] | None = None
    dropped: bool = False
    only: tuple[Connection, ...] | None = None

    def finish(self, carrier: Connection) -> None:
        """All of it is in the kernel's hands."""
        self.carrier, self.parts = carrier, ()
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class SendQueue:
    """Frames that no connection has taken yet."""

    def __init__(self) -> None:
        self.control_bytes = 0
        """Bytes of the control frames that wait."""
        self._control: deque[Outgoing] = deque()
        self._waiting: dict[bytes, deque[Outgoing]] = {}
        self._probe: deque[Outgoing] = deque()
        self._order = SendOrder()

    def __bool__(self) -> bool:
        return bool(self._control or self._waiting or self._probe)

    def push_probe(self, frame: bytes, count: int) -> None:
        """Queue a frame ``count`` times that goes when nothing else does; it is not sent again if it is lost."""
        view = memoryview(frame)
        self._probe.extend(Outgoing((view,), len(frame), dropped=True) for _ in range(count))

    def drop_probe(self) -> None:
        """Send no more of it."""
        self._probe.clear()

    def push_control(self, frame: bytes) -> None:
        """Queue an encoded control frame."""
        self.control_bytes += len(frame)
        self._control.append(Outgoing((memoryview(frame),), len(frame)))

    def push_data(
        self,
        transfer: bytes,
        head: bytes,
        payload: Sequence[memoryview],
        left: int,
        only: tuple[Connection, ...] | None = None,
    ) -> Outgoing:
        """Queue a Data frame; ``payload`` is referred to until the frame has a carrier or is dropped.

        ``left`` is what the transfer has to send with this frame and after it.
        """
        parts = (memoryview(head), *(view for view in payload if view))
        item = Outgoing(parts, sum(map(len, parts)), transfer, only=only)
        self._order.wants(transfer, left)
        self._waiting.setdefault(transfer, deque()).append(item)
        return item

    def has_for(self, connection: Connection) -> bool:
        """Whether a frame waits that may go over this connection."""
        if (self._control or self._probe) and not connection.is_lane:
            return True
        return any(self._may_go(queue[0], connection) for queue in self._waiting.values())

    @staticmethod
    def _may_go(item: Outgoing, connection: Connection | None) -> bool:
        if item.only is None:
            return connection is None or not connection.is_lane
        return connection in item.only

    def take(self, connection: Connection | None = None) -> Outgoing | None:
        """The frame that goes next over ``connection``; it is no longer in the queue.

        A lane carries what may go over it ``only``, and nothing else.
        """
        lane = connection is not None and connection.is_lane
        if self._control and not lane:
            item = self._control.popleft()
            self.control_bytes -= item.nbytes
            return item
        ready = [transfer for transfer, queue in self._waiting.items() if self._may_go(queue[0], connection)]
        if not ready:
            return self._probe.popleft() if self._probe and not lane else None
        transfer = self._order.first(ready)
        queue = self._waiting[transfer]
        item = queue.popleft()
        if not queue:
            del self._waiting[transfer]
        self._order.sent(transfer, item.nbytes)
        return item

    def put_back(self, items: Sequence[Outgoing]) -> None:
        """Frames that a lost connection had taken and not wholly sent: they go before all others of their kind."""
        for item in reversed(items):
            if item.transfer:
                self._waiting.setdefault(item.transfer, deque()).appendleft(item)
            else:
                self.control_bytes += item.nbytes
                self._control.appendleft(item)

    def remove(self, item: Outgoing) -> bool:
        """Take ``item`` out; False where it does not wait here."""
        queue = self._waiting.get(item.transfer)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._waiting[item.transfer]
        return True

    def unpin(self, transfer: bytes) -> None:
        """The frames of ``transfer`` that wait may go over any connection from now on."""
        for item in self._waiting.get(transfer, ()):
            item.only = None

    def withdraw(self) -> list[Outgoing]:
        """Take out the frames that may only go over connections none of which is left."""
        items = [item for queue in self._waiting.values() for item in queue if item.only is not None]
        lost = [item for item in items if not any(connection.alive for connection in item.only or ())]
        for item in lost:
            self.remove(item)
        return lost

    def forget(self, transfer: bytes) -> None:
        """``transfer`` sends nothing any more."""
        self._order.forget(transfer)

    def clear(self) -> list[Outgoing]:
        """Drop everything; returns the data frames."""
        items = [item for queue in self._waiting.values() for item in queue]
        self._control.clear()
        self._waiting.clear()
        self._probe.clear()
        self.control_bytes = 0
        return items


class SendBatch:
    """What one connection has taken: ``gather`` shows the next bytes, ``sent`` takes them off."""

    def __init__(self) -> None:
        self._items: deque[Outgoing] = deque()
        self._views: deque[memoryview] = deque()
        self._own: deque[Outgoing] = deque()
        self._bytes = 0
        self._left = 0

    def __bool__(self) -> bool:
        return bool(self._items or self._own)

    @property
    def between_frames(self) -> bool:
        """Whether the last byte sent ended a frame."""
        return not self._items or self._left == self._items[0].nbytes

    def push_own(self, frame: bytes) -> None:
        """A control frame that concerns this connection alone: it goes first, and is lost with it."""
        self._own.append(Outgoing((memoryview(frame),), len(frame), dropped=True))

    def gather(self, queue: SendQueue, connection: Connection | None = None) -> list[memoryview]:
        """The next bytes to send over ``connection``, in order, filled up from its own frames and ``queue``."""
        while self._bytes < BATCH_BYTES:
            item = self._own.popleft() if self._own else queue.take(connection)
            if item is None:
                break
            if not self._items:
                self._left = item.nbytes
            self._items.append(item)
            self._views.extend(item.parts)
            self._bytes += item.nbytes
        return list(self._views)

    def sent(self, nbytes: int) -> list[Outgoing]:
        """The first ``nbytes`` of what ``gather`` showed are sent; returns the frames that ended with them."""
        finished: list[Outgoing] = []
        self._bytes -= nbytes
        rest = nbytes
        while rest:
            view = self._views.popleft()
            if rest < len(view):
                self._views.appendleft(view[rest:])
                break
            rest -= len(view)
        while nbytes and nbytes >= self._left:
            nbytes -= self._left
            finished.append(self._items.popleft())
            self._left = self._items[0].nbytes if self._items else 0
        self._left -= nbytes
        return finished

    def drop(self, item: Outgoing) -> None:
        """Nobody wants ``item`` any more, but part of it may be sent: go on with a copy of what is left of it."""
        if item in self._items:
            self._views = deque([memoryview(b"".join(self._views))])
            item.parts, item.dropped = (), True

    def clear(self) -> list[Outgoing]:
        """The connection is lost: the frames that it had taken and not wholly sent, its own and dropped ones left out.

        They can be sent again over another one.
        """
        items = [item for item in self._items if not item.dropped]
        self._items.clear()
        self._views.clear()
        self._own.clear()
        self._bytes = self._left = 0
        return items
