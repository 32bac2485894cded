"""Requests that change what operators say: answered once the change holds on every gateway, or not made at all."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, Protocol

from gateway.asgi import Receive, Scope, Send
from gateway.bodies import read_body
from gateway.shared.sharing import Sharing

SHARED_PATHS = ("/v1/clusters", "/v1/keys", "/v1/tenants")
READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Application(Protocol):
    """What answers such a request, from what is known here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def changes_shared(scope: Scope) -> bool:
    """Whether a request may change what all gateways must know."""
    path: str = scope["path"]
    return scope["method"] not in READS and any(
        path == shared or path.startswith(shared + "/") for shared in SHARED_PATHS
    )


async def committed(
    application: Application, sharing: Sharing, scope: Scope, receive: Receive, send: Send, max_body_bytes: int
) -> None:
    """Let the application answer, and hold the answer back until all have the change. Raises ApiError.

    The body is read first: nobody else's change waits for a slow client.
    """
    body = await read_body(scope, receive, max_body_bytes)
    held: list[MutableMapping[str, Any]] = []
    told = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal told
        if told:
            await asyncio.Event().wait()  # whoever left meanwhile is told nothing
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def hold(event: MutableMapping[str, Any]) -> None:
        held.append(event)

    async with sharing.writing():
        await application(scope, replay, hold)
    for event in held:
        await send(event)
