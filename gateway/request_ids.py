"""How a request is called: by its client if that name is safe to log and to echo."""

from __future__ import annotations

import re
import secrets

from gateway.asgi import Scope, header

SAFE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""To be matched in full."""


def request_id(scope: Scope) -> str:
    """The client's own id, else a fresh one."""
    given = header(scope, b"x-request-id")
    return given if given is not None and SAFE.fullmatch(given) else secrets.token_hex(12)
