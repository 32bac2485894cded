"""What all routes share: who may call, and JSON out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from gateway.errors import ApiError
from gateway.keys import Principal, Role


def needs(*roles: Role) -> Any:
    """A dependency that refuses callers of other roles; admin passes everywhere.

    So are keys that are bound to clusters: what these routes show and change is of all clusters.
    """

    def check(request: Request) -> None:
        principal = _caller(request, roles)
        if principal.clusters is not None and principal.role in (Role.OPERATOR, Role.PLANNER):
            bound = ", ".join(sorted(principal.clusters)) or "none"
            raise ApiError(
                403, f"this key is bound to clusters ({bound}), and this is about all of them", code="cluster_scope"
            )

    return _for(roles, check)


def operator_of(*others: Role) -> Any:
    """A dependency of routes about the cluster ``name`` in their path: its operators, the ``others``, and admins.

    A key that is bound to other clusters gets the 404 of a cluster that is not there.
    """

    def check(request: Request) -> None:
        principal = _caller(request, (Role.OPERATOR, *others))
        name = request.path_params["name"]
        if not sees(principal, name):
            raise ApiError(404, f"no cluster is named {name!r}", param="cluster", code="cluster_not_found")

    return _for((Role.OPERATOR, *others), check)


def some_clusters(*roles: Role) -> Any:
    """A dependency of routes that show each caller what ``sees`` lets it see. Its value is the caller."""

    def check(request: Request) -> Principal:
        return _caller(request, roles)

    return _for(roles, check)


def roles_of(route: APIRoute) -> tuple[str, ...]:
    """The roles that a route asks for, beside admin; () where any caller may."""
    found = (getattr(one.call, "roles", None) for one in route.dependant.dependencies)
    return next((tuple(role.value for role in roles) for roles in found if roles is not None), ())


def _for(roles: tuple[Role, ...], check: Callable[..., Any]) -> Any:
    """A dependency whose roles can be seen, for whoever describes the routes."""
    check.roles = roles  # type: ignore[attr-defined]
    return Depends(check)


def sees(principal: Principal, cluster: str) -> bool:
    """Whether a cluster is this caller's to see and change."""
    return not bound(principal) or cluster in (principal.clusters or ())


def bound(principal: Principal) -> bool:
    """Whether a caller answers for some clusters only."""
    return principal.role is not Role.ADMIN and principal.clusters is not None


def caller_of(request: Request) -> Principal:
    """Who sent an authenticated request."""
    principal: Principal = request.scope["prfaas.principal"]
    return principal


def _caller(request: Request, roles: tuple[Role, ...]) -> Principal:
    principal = caller_of(request)
    if not principal.may(*roles):
        wanted = " or ".join(role.value for role in roles)
        raise ApiError(403, f"this needs a key with role {wanted}", code="role_forbidden")
    return principal


def refused(error: ApiError) -> Response:
    """An error as all are answered."""
    return json_answer(error.body(), error.status, {name.decode(): value.decode() for name, value in error.headers()})


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON; infinities become null."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
