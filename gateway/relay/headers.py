"""Which headers pass, in either direction: none that speak of one connection, and no secret of either side."""

from __future__ import annotations

from collections.abc import Iterable

Header = tuple[bytes, bytes]

_OF_A_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
    | {b"proxy-authenticate", b"proxy-authorization", b"content-length", b"x-request-id"}
)
_NOT_TO_ENGINES = _OF_A_CONNECTION | {
    b"host",
    b"expect",
    b"authorization",
    b"cookie",
    b"x-api-key",
    b"accept-encoding",  # usage is read from the answer's last bytes
}
_NOT_TO_CLIENTS = _OF_A_CONNECTION | {b"date", b"server", b"set-cookie", b"www-authenticate"}
_OURS = b"x-prfaas-"
_CORS = b"access-control-"
"""Whether pages of other sites may read answers is not for engines to say."""


def to_engine(headers: Iterable[Header]) -> list[Header]:
    """Of a client's request. The names are lower-case."""
    passed = [(name, value) for name, value in headers if name not in _NOT_TO_ENGINES and not name.startswith(_OURS)]
    named = _named(headers)
    return [header for header in passed if header[0] not in named] if named else passed


def traced(headers: Iterable[Header], traceparent: str) -> Iterable[Header]:
    """With this context of a trace in the place of the client's, where there is one."""
    if not traceparent:
        return headers
    return [*(header for header in headers if header[0] != b"traceparent"), (b"traceparent", traceparent.encode())]


def to_client(headers: Iterable[Header]) -> list[Header]:
    """Of an engine's response. The names are lower-case."""
    passed = [
        (name, value) for name, value in headers if name not in _NOT_TO_CLIENTS and not name.startswith((_CORS, _OURS))
    ]
    named = _named(headers)
    return [header for header in passed if header[0] not in named] if named else passed


def lines(headers: Iterable[Header]) -> bytes:
    """As they stand in a head."""
    return b"".join([b"%s: %s\r\n" % header for header in headers])


def _named(headers: Iterable[Header]) -> set[bytes]:
    """What the Connection header declares to be of this connection only."""
    tokens = [token for name, value in headers if name == b"connection" for token in value.split(b",")]
    return {token.strip().lower() for token in tokens} - {b"close", b"keep-alive"} if tokens else set()
