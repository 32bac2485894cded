"""What is heeded of a request's body before it is passed on as it is."""

from __future__ import annotations

from typing import Any

import msgspec

CHARS_A_TOKEN = 4
"""About what a tokeniser makes of text; what the engine counted replaces it when the answer is whole."""


class StreamOptions(msgspec.Struct, frozen=True):
    """Of a streamed answer."""

    include_usage: Any = None


class Asked(msgspec.Struct, frozen=True):
    """Fields of either generation endpoint. Whatever else there is, and any value that cannot be, is the engine's."""

    model: str
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    priority: Any = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None

    @property
    def forbidden(self) -> str | None:
        """A field that must not come from a client: it would have the engine fetch KV from any address."""
        given = self.kv_transfer_params, self.bootstrap_host, self.bootstrap_port, self.bootstrap_room
        return None if given == _NOT_GIVEN else next(name for name in _FORBIDDEN if getattr(self, name) is not None)

    def prompt_tokens(self, body_bytes: int) -> int:
        """About how many tokens the prompt of a body of that size has."""
        return max(1, body_bytes // CHARS_A_TOKEN)

    @property
    def bound(self) -> int | None:
        """Tokens that the answers have at most, where the client said so."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if type(given) is not int or given < 1:
            return None
        return given * (self.n if type(self.n) is int and self.n > 1 else 1)

    @property
    def urgency(self) -> int:
        """Its priority; the least is first."""
        return self.priority if type(self.priority) is int else 0

    @property
    def tells_usage(self) -> bool:
        """Whether the answer says how many tokens it was: a whole one always does."""
        return self.stream is not True or (
            self.stream_options is not None and self.stream_options.include_usage is True
        )


_FORBIDDEN = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_NOT_GIVEN = (None,) * len(_FORBIDDEN)
_DECODER = msgspec.json.Decoder(Asked)


def parse(body: bytes) -> Asked | None:
    """None for what is no request to a model."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def with_usage(body: bytes) -> bytes:
    """The body, asking for an event with usage at the stream's end. Everything else stays as it was written."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    options = msgspec.json.decode(fields["stream_options"]) if "stream_options" in fields else None
    changed = (options or {}) | {"include_usage": True}
    return msgspec.json.encode(fields | {"stream_options": msgspec.Raw(msgspec.json.encode(changed))})
