"""Errors as the OpenAI API words them: one object with message, type, param and code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error.

    ``param`` names the field of the request, ``code`` is stable for programs, ``retry_after_s`` becomes Retry-After,
    ``allow`` the methods that a 405 names; ``told`` are further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allow: tuple[str, ...] = (),
        told: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow
        self.told = told

    def body(self) -> dict[str, Any]:
        """The JSON object that a client reads."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Extra response headers."""
        extra = list(self.told)
        if self.retry_after_s is not None:
            extra.append((b"retry-after", str(max(1, round(self.retry_after_s + 0.499))).encode()))
        if self.allow:
            extra.append((b"allow", ", ".join(self.allow).encode()))
        if self.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        return extra


def bad_field(param: str, message: str, code: str | None = None) -> ApiError:
    """400 for one field of the request."""
    return ApiError(400, message, param=param, code=code)
