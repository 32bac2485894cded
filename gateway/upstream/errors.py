"""How an exchange with an upstream fails."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Short words, safe to log and to count."""

    CONNECT = "connect_failed"
    CONNECT_TIMEOUT = "connect_timeout"
    TLS = "tls_failed"
    POOL_FULL = "pool_full"
    CLOSED = "closed"
    PROTOCOL = "protocol"
    TOO_LARGE = "too_large"
    STALLED = "stalled"
    DEADLINE = "deadline"


class UpstreamError(Exception):
    """An exchange is over without a whole response.

    ``answered``: some byte of the response had come. ``sent``: some byte of the request may have arrived there.
    """

    def __init__(self, cause: Cause, detail: str, *, sent: bool = False, answered: bool = False) -> None:
        super().__init__(f"{cause.value}: {detail}")
        self.cause = cause
        self.detail = detail
        self.sent = sent
        self.answered = answered
