"""What all routes share: who may call, and JSON out."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Depends, Request, Response

from gateway.errors import ApiError
from gateway.keys import Principal, Role


def needs(*roles: Role) -> Any:
    """A dependency that refuses callers of other roles; admin passes everywhere."""

    def check(request: Request) -> None:
        principal: Principal = request.scope["prfaas.principal"]
        if not principal.may(*roles):
            wanted = " or ".join(role.value for role in roles)
            raise ApiError(403, f"this needs a key with role {wanted}", code="role_forbidden")

    return Depends(check)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON; infinities become null."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
