"""Who may call what: keys, and the loopback rule."""

from __future__ import annotations

from time import time

from gateway.asgi import Scope, header
from gateway.errors import ApiError
from gateway.keys import LOOPBACK_ADMIN, KeyBook, Principal
from gateway.web.files import ENTRY, FILES
from kvcache.hosts import is_loopback

OPEN_PATHS = frozenset({"/live", "/ready", "/v1/join", "/v1/join/roots", ENTRY, *FILES})
"""Without a key; joining nodes show their token there."""
_FORWARDING = (b"forwarded", b"x-forwarded-for", b"x-real-ip")


class Access:
    """Authenticates HTTP callers."""

    def __init__(self, keys: KeyBook) -> None:
        self._keys = keys

    def caller(self, scope: Scope) -> Principal:
        """Who sent this request. Raises ApiError 401 or 403."""
        secret = bearer(scope)
        if secret is not None:
            found = self._keys.find(secret)
            if found is not None:
                if found.expired(time()):
                    raise ApiError(401, "this API key has expired; have its expiry changed", code="expired_api_key")
                return found
        if len(self._keys):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if not from_this_machine(scope):
            raise ApiError(
                403,
                "no API key exists yet, so only this machine may call: create one with `prfaas keys create`",
                code="loopback_only",
            )
        return LOOPBACK_ADMIN


def from_this_machine(scope: Scope) -> bool:
    """Whether a caller is on the loopback, and is neither a proxy's client nor a page in a browser.

    A page of another site can make a browser call 127.0.0.1: it shows in Origin, or in Host where a name was rebound.
    """
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    if any(header(scope, name) is not None for name in _FORWARDING):
        return False
    host = header(scope, b"host") or ""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if not is_loopback(name):
        return False
    origin = header(scope, b"origin")
    return origin is None or origin.split("://", 1)[-1] == host


def bearer(scope: Scope) -> str | None:
    """The secret of an Authorization header, or None."""
    value = header(scope, b"authorization")
    if value is None or value[:7].lower() != "bearer ":
        return None
    return value[7:].strip() or None
