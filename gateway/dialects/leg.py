"""One HTTP exchange with an engine, and how it fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.dialects.protocol import Ask, Side
from gateway.upstream.errors import Cause, UpstreamError
from gateway.upstream.pool import Pool
from gateway.upstream.response import Response
from scheduler.retrying import Failure, failure_of

MAX_ANSWER_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
_ENGINES_FAULT = (401, 403, 404, 405)
"""A wrong key, model or path: the request was right, or it would not have come here."""
_KINDS = {
    Cause.CONNECT: Failure.NOT_SENT,
    Cause.CONNECT_TIMEOUT: Failure.NOT_SENT,
    Cause.TLS: Failure.NOT_SENT,
    Cause.POOL_FULL: Failure.BUSY,
    Cause.DEADLINE: Failure.LATE,
}

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class LegFailed(Exception):
    """One leg of a request is over without success.

    ``leg`` is prefill or decode, ``cause`` a short word. ``status`` and ``body`` are the engine's answer, where it gave
    one. ``faulty``: it says something of the engine, not of the request alone.
    """

    def __init__(
        self, leg: str, cause: str, kind: Failure, *, status: int = 0, body: bytes = b"", faulty: bool = True
    ) -> None:
        super().__init__(f"{leg}: {cause}")
        self.leg = leg
        self.cause = cause
        self.kind = kind
        self.status = status
        self.body = body
        self.faulty = faulty


def broken(leg: str, error: UpstreamError) -> LegFailed:
    """The exchange itself broke."""
    return LegFailed(leg, error.cause.value, _KINDS.get(error.cause, Failure.LOST))


async def send(pool: Pool, leg: str, side: Side, ask: Ask, request_id: str, deadline_s: float) -> Response:
    """Ask an engine; its response, of which the body is still to be read, once it is a success. Raises LegFailed."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode()), *ask.headers]
    if side.engine.key is not None:
        headers.append((b"authorization", b"Bearer " + side.engine.key.encode()))
    if deadline_s <= 0:
        raise LegFailed(leg, "deadline", Failure.LATE)
    url, body = side.engine.url + ask.path, msgspec.json.encode(ask.body)
    try:
        response = await pool.request("POST", url, headers, body, deadline_s=deadline_s)
    except UpstreamError as error:
        raise broken(leg, error) from error
    kind = failure_of(response.status)
    if kind is None:
        return response
    async with response:
        try:
            said = await response.read(MAX_ERROR_BYTES)
        except UpstreamError:
            said = b""
    if response.status in _ENGINES_FAULT:
        kind = Failure.BROKEN
    faulty = kind is not Failure.REQUEST
    raise LegFailed(leg, f"http_{response.status}", kind, status=response.status, body=said, faulty=faulty)


async def read_json(response: Response, leg: str) -> dict[str, Any]:
    """The body as a JSON object; closes what it does not read. Raises LegFailed."""
    async with response:
        try:
            return parse(await response.read(MAX_ANSWER_BYTES))
        except UpstreamError as error:
            raise broken(leg, error) from error
        except ValueError as error:
            raise LegFailed(leg, "no_json", Failure.BROKEN) from error


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def error_status(payload: Mapping[str, Any]) -> int | None:
    """The status of an error inside a stream, 500 where it names none; None for what is no error."""
    error = payload.get("error")
    if error is None and payload.get("object") != "error":
        return None
    code = (error if isinstance(error, dict) else payload).get("code")
    return code if type(code) is int and 400 <= code < 600 else 500
