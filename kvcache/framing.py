"""Bytes in, frames out. Sans-I/O, in the style of asyncio's BufferedProtocol, so that payloads are never copied.

The owner of a socket reads into ``get_buffers()``, says ``buffer_updated(n)`` and pulls ``next_frame()`` until it
answers None. Small frames pass through a fixed scratch buffer. When a Data header has come, the owner's callback names
the memory its payload belongs in, and from then on ``get_buffers()`` starts with that memory; the scratch follows it,
so one read may end a payload and begin the next frame. Pulling, rather than being called, lets an owner stop between
two frames and go on later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcache.wire import (
    HEADER_BYTES,
    MAX_CONTROL_BODY,
    MAX_DATA_HEAD,
    MAX_HANDSHAKE_BODY,
    MAX_PAYLOAD_BYTES,
    OLDEST_WIRE_VERSION,
    WIRE_VERSION,
    Data,
    Frame,
    Hello,
    Kind,
    WireError,
    decode_body,
    header,
)

SCRATCH_BYTES = 16 << 10

_HANDSHAKE = frozenset({Kind.HELLO, Kind.PROOF, Kind.ABORT})
_kinds = {int(kind): kind for kind in Kind}


def drop_payload(_data: Data) -> None:
    """The payload target of a parser that takes no payload."""


class FrameParser:
    """One connection's incoming bytes.

    ``target(data)`` returns writable memory of exactly ``data.wire_bytes`` bytes in total, or None to have the payload
    read and dropped (its frame is then not returned). Until ``establish()`` only handshake frames of at most 4 KiB are
    read. Every bound is checked before memory is taken: the parser itself never holds more than its scratch and one
    control frame.
    """

    def __init__(
        self,
        target: Callable[[Data], Sequence[memoryview] | None] = drop_payload,
        oldest_version: int = OLDEST_WIRE_VERSION,
        newest_version: int = WIRE_VERSION,
    ) -> None:
        self.target = target
        self.hello_body = b""
        """The last Hello's body as it was sent: what a Proof signs, fields unknown to this version included."""
        self._oldest = oldest_version
        self._newest = newest_version
        self._established = False
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._begin = 0
        self._end = 0
        self._kind: Kind | None = None
        self._body_bytes = 0
        self._payload_bytes = 0
        self._body: memoryview | None = None
        self._body_got = 0
        self._data: Data | None = None
        self._views: list[memoryview] = []
        self._discard = 0

    def establish(self) -> None:
        """The handshake is over: from now on its frames are refused and all others are read."""
        self._established = True

    @property
    def receiving(self) -> Data | None:
        """The Data frame whose payload is under way into memory that the target named."""
        return self._data

    def discard_payload(self) -> None:
        """Let go of the memory of the payload under way; what is still to come of it is read and dropped."""
        self._discard += sum(len(view) for view in self._views)
        self._views = []
        self._data = None

    def get_buffers(self) -> list[memoryview]:
        """Where the next bytes belong, in order; never empty. Call it only when ``next_frame()`` answered None."""
        if self._views:
            return [*self._views, self._scratch]
        if self._body is not None:
            return [self._body[self._body_got :], self._scratch]
        if self._begin:
            rest = self._scratch[self._begin : self._end].tobytes()
            self._scratch[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        return [self._scratch[self._end :]]

    def buffer_updated(self, nbytes: int) -> None:
        """``nbytes`` (at least 1) were written to the buffers, first to last."""
        if self._views:
            nbytes = self._fill_views(nbytes)
        elif self._body is not None:
            filled = min(nbytes, len(self._body) - self._body_got)
            self._body_got += filled
            nbytes -= filled
        self._end += nbytes

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes come. Raises WireError, after which the parser is of no use.

        A Data frame is returned once its payload lies in its target. What the target raises passes through, and that
        payload is dropped.
        """
        while True:
            if self._data is not None:
                if self._views:
                    return None
                data, self._data = self._data, None
                return data
            if self._discard:
                dropped = min(self._discard, self._end - self._begin)
                self._begin += dropped
                self._discard -= dropped
                if self._discard:
                    return None
            if self._kind is None and not self._read_header():
                return None
            body = self._take_body()
            if body is None:
                return None
            kind, self._kind = self._kind, None
            assert kind is not None
            frame = decode_body(kind, body)
            if isinstance(frame, Data):
                self._begin_payload(frame)
            else:
                if isinstance(frame, Hello):
                    self.hello_body = bytes(body)
                return frame

    def _read_header(self) -> bool:
        """Take a frame's eight bytes from the scratch and check them, before any memory is taken for the frame."""
        if self._end - self._begin < HEADER_BYTES:
            return False
        length, version, number, head = header.unpack_from(self._scratch, self._begin)
        self._begin += HEADER_BYTES
        if not self._oldest <= version <= self._newest:
            raise WireError("version", f"{version}, spoken here are {self._oldest} to {self._newest}")
        kind = _kinds.get(number)
        if kind is None:
            raise WireError("kind", f"{number} is unknown")
        if (kind in _HANDSHAKE and kind is not Kind.ABORT) if self._established else (kind not in _HANDSHAKE):
            raise WireError("kind", f"{kind.name} {'after' if self._established else 'before'} the handshake's end")
        if kind is Kind.DATA:
            if not 1 <= head <= min(length, MAX_DATA_HEAD):
                raise WireError("head", f"{head} bytes in a Data frame of {length}, at most {MAX_DATA_HEAD}")
            if length - head > MAX_PAYLOAD_BYTES:
                raise WireError("length", f"{length - head} bytes of payload, at most {MAX_PAYLOAD_BYTES}")
            self._body_bytes, self._payload_bytes = head, length - head
        else:
            limit = MAX_CONTROL_BODY if self._established else MAX_HANDSHAKE_BODY
            if head:
                raise WireError("head", f"{head} in a {kind.name} frame, expected 0")
            if not 1 <= length <= limit:
                raise WireError("length", f"{length} bytes of {kind.name}, expected 1 to {limit}")
            self._body_bytes = length
        self._kind = kind
        return True

    def _take_body(self) -> memoryview | None:
        """The body's bytes once they are all there, valid until the next read."""
        if self._body is not None:
            if self._body_got < len(self._body):
                return None
            body, self._body = self._body, None
            return body
        have = self._end - self._begin
        if have >= self._body_bytes:
            body = self._scratch[self._begin : self._begin + self._body_bytes]
            self._begin += self._body_bytes
            return body
        if self._body_bytes > SCRATCH_BYTES // 2:
            self._body = memoryview(bytearray(self._body_bytes))
            self._body[:have] = self._scratch[self._begin : self._end]
            self._body_got = have
            self._begin = self._end = 0
        return None

    def _begin_payload(self, data: Data) -> None:
        if data.wire_bytes != self._payload_bytes:
            raise WireError("wire_bytes", f"{data.wire_bytes}, but {self._payload_bytes} bytes follow the header")
        self._discard = self._payload_bytes
        views = self.target(data)
        if views is None:
            return
        views = [view.cast("B") for view in views if view.nbytes]
        if sum(len(view) for view in views) != self._payload_bytes:
            raise ValueError(f"the target of {self._payload_bytes} bytes holds {sum(len(view) for view in views)}")
        self._discard = 0
        self._data, self._views = data, views
        self._drain_scratch()

    def _drain_scratch(self) -> None:
        """Payload that was read along with its header lies in the scratch: copy it where it belongs."""
        while self._views and self._begin < self._end:
            view = self._views[0]
            count = min(len(view), self._end - self._begin)
            view[:count] = self._scratch[self._begin : self._begin + count]
            self._begin += count
            self._fill_views(count)
        if self._views:
            self._begin = self._end = 0

    def _fill_views(self, nbytes: int) -> int:
        """Account for ``nbytes`` written to the payload's memory; returns those beyond its end."""
        whole = 0
        for view in self._views:
            if nbytes < len(view):
                break
            nbytes -= len(view)
            whole += 1
        del self._views[:whole]
        if self._views and nbytes:
            self._views[0] = self._views[0][nbytes:]
            nbytes = 0
        return nbytes
