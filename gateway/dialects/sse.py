"""Server-sent events as bytes: cut where one ends, whatever the pieces they came in."""

from __future__ import annotations

from typing import Any

from gateway.dialects.leg import parse

MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"


class EventTooLarge(ValueError):
    """An event that does not end."""


class Cutter:
    """Whole events out of the parts of a body. An event is returned with its blank line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that ``data`` ends. Raises EventTooLarge."""
        data = self._rest + data if self._rest else data
        if b"\r" in data:  # engines end lines by LF; a CR at the end waits for what follows
            held = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n") if not held else data[:-1].replace(b"\r\n", b"\n") + b"\r"
        parts = data.split(b"\n\n")
        self._rest = parts.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [part + b"\n\n" for part in parts if part]

    @property
    def rest(self) -> bytes:
        """What came after the last whole event."""
        return self._rest


def data_of(event: bytes) -> bytes:
    """The data lines of an event, joined; empty for comments."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def payload_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object that an event carries; None for comments and for the last one. Raises ValueError."""
    data = data_of(event)
    return None if not data or data.strip() == DONE else parse(data)
