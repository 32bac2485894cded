"""The page's files, as they are: no build, nothing from elsewhere, and nothing in them that a stranger may not know."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request, Response

from gateway.web.files import FILES

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GUARDS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_shell(api: FastAPI) -> None:
    """Serve every file of the page at its path."""
    folder = files("gateway.web") / "static"
    for path, (name, kind) in FILES.items():
        _serve(api, path, (folder / name).read_bytes(), kind)


def _serve(api: FastAPI, path: str, data: bytes, kind: str) -> None:
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    headers = _GUARDS | {"etag": tag}

    @api.get(path, include_in_schema=False)
    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)
