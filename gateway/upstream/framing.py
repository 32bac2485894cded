"""Chunked bodies: read strictly, and passed on as they are wherever a read holds nothing but whole chunks."""

from __future__ import annotations

from typing import Protocol

MAX_LINE = 1024
"""Of a chunk's size with its extensions."""
MAX_TRAILER_BYTES = 16 << 10
_PLAIN_LINE = 18
"""Sixteen digits and their line's end: longer ones are read with care."""


class BadChunk(ValueError):
    """What is no chunked coding."""


class BodySink(Protocol):
    """Who takes a body."""

    def on_chunks(self, framed: bytes) -> None:
        """Whole chunks, exactly as they came: sizes, contents and line ends; no extension, not the last one."""

    def on_data(self, data: bytes) -> None:
        """A part of the content."""


class Chunked:
    """Reads one chunked body. ``verbatim``: what are whole chunks goes to ``on_chunks``, all else to ``on_data``."""

    def __init__(self, sink: BodySink, verbatim: bool) -> None:
        self._sink = sink
        self._verbatim = verbatim
        self._left = 0
        self._line = b""
        self._trailers = False
        self._trailer_bytes = 0
        self._data_end = False
        self._stopped = False

    def stop(self) -> None:
        """Nobody wants the rest; a call of ``feed`` that is under way says nothing more."""
        self._stopped = True

    def feed(self, data: bytes) -> bytes | None:
        """Take what came. Returns what lies beyond the body's end, None before it. Raises BadChunk."""
        if self._verbatim and not self._left and not self._line and not self._data_end and not self._trailers:
            whole = _whole_chunks(data)
            if whole == len(data):
                self._sink.on_chunks(data)
                return None
            if whole:
                self._sink.on_chunks(data[:whole])
                data = data[whole:]
            if data == b"0\r\n\r\n":
                return b""
        return self._careful(data)

    def _careful(self, data: bytes) -> bytes | None:
        at = 0
        while at < len(data) and not self._stopped:
            if self._left:
                part = data[at : at + self._left]
                at += len(part)
                self._left -= len(part)
                self._data_end = not self._left
                self._sink.on_data(part)
                continue
            end = data.find(b"\n", at)
            line = self._line + (data[at:] if end < 0 else data[at : end + 1])
            if len(line) > MAX_LINE:
                raise BadChunk(f"a line of more than {MAX_LINE} bytes")
            if end < 0:
                self._line = line
                return None
            at, self._line = end + 1, b""
            if not line.endswith(b"\r\n"):
                raise BadChunk("a line that ends without CR")
            if self._on_line(line[:-2]):
                return data[at:]
        return None

    def _on_line(self, line: bytes) -> bool:
        """One line that is no content; True for the body's last."""
        if self._trailers:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise BadChunk(f"trailers of more than {MAX_TRAILER_BYTES} bytes")
            return not line
        if self._data_end:
            if line:
                raise BadChunk("a chunk longer than its size")
            self._data_end = False
            return False
        digits = line.partition(b";")[0].rstrip(b" \t")
        size = _size(digits)
        if size is None:
            raise BadChunk(f"size {digits[:40]!r}")
        self._left, self._trailers = size, not size
        return False


def _whole_chunks(data: bytes) -> int:
    """How many bytes of ``data`` are whole chunks without extensions, the last (empty) one not counted."""
    at, length = 0, len(data)
    while at < length:
        line_end = data.find(b"\r\n", at, at + _PLAIN_LINE)
        if line_end < 0:
            break
        size = _size(data[at:line_end])
        if not size:
            break
        end = line_end + 2 + size
        if data[end : end + 2] != b"\r\n":
            break
        at = end + 2
    return at


def _size(digits: bytes) -> int | None:
    """Hexadecimal digits and nothing else; ``int`` alone would also take signs, blanks, underscores and 0x."""
    if not digits.isalnum() or len(digits) > 15 or digits[1:2] in (b"x", b"X"):
        return None
    try:
        return int(digits, 16)
    except ValueError:
        return None


def content_of(framed: bytes) -> bytes:
    """What whole chunks hold, as ``on_chunks`` is handed them."""
    parts, at = [], 0
    while at < len(framed):
        line_end = framed.index(b"\r\n", at)
        end = line_end + 2 + int(framed[at:line_end], 16)
        parts.append(framed[line_end + 2 : end])
        at = end + 2
    return b"".join(parts)
