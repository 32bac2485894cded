"""Bodies of requests: what form they must have, and reading one that comes by ASGI."""

from __future__ import annotations

import asyncio

from gateway.asgi import Receive, Scope, header
from gateway.errors import ApiError

BODY_TIMEOUT_S = 30.0


async def read_json(scope: Scope, receive: Receive, limit: int) -> bytes:
    """A body that must be there and be JSON, not yet parsed. Raises ApiError as ``read_body``, 411 and 415, too."""
    check_form(scope)
    return await read_body(scope, receive, limit)


def check_form(scope: Scope) -> None:
    """Raise ApiError for a body of unknown length, and for one that says it is no JSON."""
    coded = header(scope, b"content-encoding")
    if coded is not None and coded.lower() != "identity":
        text = "content-encoding: bodies are read as they are; send it unpacked"
        raise ApiError(415, text, code="unsupported_encoding")
    kind = (header(scope, b"content-type") or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "content-type: bodies are JSON; say application/json", code="unsupported_media_type")
    if header(scope, b"content-length") is None and header(scope, b"transfer-encoding") is None:
        raise ApiError(411, "content-length: say how long the body is, or send it in chunks", code="length_required")


def too_large(limit: int) -> ApiError:
    """A body beyond ``limit`` bytes."""
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def too_slow() -> ApiError:
    """A body that has not come in time."""
    return ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="body_timeout")


def announced_too_large(scope: Scope, limit: int) -> bool:
    """Whether a body need not be waited for: its head says that it is beyond ``limit`` bytes."""
    announced = header(scope, b"content-length")
    return announced is not None and announced.isdigit() and int(announced) > limit


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request's body. Raises ApiError 413 beyond ``limit`` bytes, 408 where it does not come, 400 if cut off."""
    if announced_too_large(scope, limit):
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ApiError(400, "the body was cut off", code="body_cut_off")
                part = event.get("body", b"")
                size += len(part)
                if size > limit:
                    raise too_large(limit)
                parts.append(part)
                if not event.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise too_slow() from None
