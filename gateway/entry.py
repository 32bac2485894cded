"""Where requests come in, but for those to generate: who asks is found out, then they go to streams or routes."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from gateway.access import OPEN_PATHS, Access
from gateway.answers import refused
from gateway.asgi import Receive, Scope, Send
from gateway.audit import AuditLog
from gateway.config import GatewayConfig
from gateway.cors import Cors
from gateway.errors import ApiError
from gateway.hot import ENDPOINTS
from gateway.methods import methods_at, with_implied
from gateway.shared.committing import changes_shared, committed
from gateway.shared.sharing import Sharing
from gateway.stream import ControlStreams

STREAM_PATH = "/v1/nodes/stream"


class Entry:
    """Of one gateway, by ASGI."""

    def __init__(
        self,
        config: Callable[[], GatewayConfig],
        access: Access,
        cors: Cors,
        audit: AuditLog,
        shared: Sharing,
        streams: ControlStreams,
        routes: FastAPI,
    ) -> None:
        self._config = config
        self._access = access
        self._cors = cors
        self._audit = audit
        self._shared = shared
        self._streams = streams
        self._routes = routes

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        path = scope["path"]
        send = self._cors.telling(scope, send)
        if scope["method"] == "OPTIONS":
            await self._options(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # uvicorn sends no body where one is asked for
            scope = {**scope, "method": "GET"}
        if path not in OPEN_PATHS:
            try:
                principal = self._access.caller(scope)
            except ApiError as error:
                await refused(error)(scope, receive, send)
                return
            if path in ENDPOINTS:  # what may be done there does not come by ASGI
                text, allowed = f"{path} takes POST, not {scope['method']}", with_implied({"POST"})
                wrong = ApiError(405, text, code="method_not_allowed", allow=allowed)
                await refused(wrong)(scope, receive, send)
                return
            scope["prfaas.principal"] = principal
            send = self._audit.watching(scope, principal.key_id or principal.name, send)
        if changes_shared(scope):
            try:
                await committed(self._routes, self._shared, scope, receive, send, self._config().max_body_bytes)
            except ApiError as error:
                await refused(error)(scope, receive, send)
            return
        await self._routes(scope, receive, send)

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One WebSocket; only nodes have any."""
        if scope["path"] == STREAM_PATH:
            await self._streams.serve(scope, receive, send)
            return
        await receive()
        await send({"type": "websocket.close", "code": 1008})

    async def _options(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What may be done at a path, for anybody; and what browsers ask before a page of another origin may do it."""
        path = scope["path"]
        methods = with_implied({"POST"}) if path in ENDPOINTS else methods_at(self._routes.routes, path)
        if not methods:
            missing = ApiError(404, f"no route {path}", code="not_found")
            await refused(missing)(scope, receive, send)
            return
        headers = [(b"allow", ", ".join(methods).encode()), *self._cors.preflight(scope, methods)]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
