"""Pages of other origins: none may read what a gateway answers, unless its operator named them.

Credentials are keys in a header that the page itself must hold; cookies are not used, and not allowed.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from gateway.asgi import Scope, Send, header

ORIGIN = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[1-9][0-9]{0,4})?")
MAX_AGE_S = 600
_EXPOSED = b"x-request-id, retry-after, x-prfaas-route, x-prfaas-route-reason, x-prfaas-prefill, x-prfaas-kv-codec"
_ASKED = re.compile(r"[A-Za-z0-9, -]{0,1024}")
Headers = list[tuple[bytes, bytes]]


class Cors:
    """``origins`` are those of pages that may call; none by default."""

    def __init__(self, origins: tuple[str, ...] = ()) -> None:
        self._origins = frozenset(origins)

    def headers(self, scope: Scope) -> Headers:
        """What an answer to this request says to the browser."""
        if not self._origins:
            return []
        varies: Headers = [(b"vary", b"origin")]
        origin = header(scope, b"origin")
        if origin is None or origin not in self._origins:
            return varies
        named = (b"access-control-allow-origin", origin.encode())
        return [*varies, named, (b"access-control-expose-headers", _EXPOSED)]

    def preflight(self, scope: Scope, methods: tuple[str, ...]) -> Headers:
        """What a browser must hear beside that before it sends a request with a key or a JSON body."""
        if header(scope, b"origin") not in self._origins:
            return []
        asked = header(scope, b"access-control-request-headers") or ""
        allowed = asked if _ASKED.fullmatch(asked) else ""
        return [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-allow-headers", allowed.encode()),
            (b"access-control-max-age", str(MAX_AGE_S).encode()),
        ]

    def telling(self, scope: Scope, send: Send) -> Send:
        """A ``send`` whose answers have the headers."""
        said = self.headers(scope)
        if not said:
            return send

        async def telling(event: MutableMapping[str, Any]) -> None:
            if event["type"] == "http.response.start":
                event = {**event, "headers": [*event.get("headers", ()), *said]}
            await send(event)

        return telling
