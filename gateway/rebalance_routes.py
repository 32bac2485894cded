"""Operator and planner routes of the long-term loop: converting a node, proposals, replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path, Query, Request, Response

from gateway.answers import json_answer, needs
from gateway.errors import ApiError, bad_field
from gateway.keys import Principal, Role
from gateway.rebalancing import Rebalancing
from kvcache.wire import Role as NodeRole

BodyOf = Callable[[Request, type[Any]], Awaitable[Any]]

MOST_NUMBER = 2**63 - 1
"""That a row of the state can have."""
_ROLES = {"prefill": NodeRole.PREFILL, "decode": NodeRole.DECODE}


class RoleBody(msgspec.Struct, frozen=True):
    """The role that a node is to play, and why."""

    role: str
    reason: str = "asked for by an operator"


def add_rebalance_routes(api: FastAPI, rebalancing: Rebalancing, body_of: BodyOf) -> None:
    """Add the routes to the application."""
    conversions, history, controller = rebalancing.conversions, rebalancing.history, rebalancing.controller

    @api.post("/v1/nodes/{node_id}/role", dependencies=[needs(Role.OPERATOR)])
    async def convert(node_id: str, request: Request) -> Response:
        body: RoleBody = await body_of(request, RoleBody)
        if body.role not in _ROLES:
            raise bad_field("role", f"role: must be prefill or decode, got {body.role[:40]!r}")
        record = conversions.begin(node_id, _ROLES[body.role], body.reason, _who(request))
        return json_answer(record, 202)

    @api.get("/v1/conversions", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def list_conversions(limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Response:
        return json_answer({"conversions": history.conversions(limit)})

    @api.get("/v1/conversions/{number}", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def one_conversion(number: Annotated[int, Path(ge=0, le=MOST_NUMBER)]) -> Response:
        record = conversions.record(number)
        if record is None:
            raise ApiError(404, f"no conversion has number {number}", code="conversion_not_found")
        return json_answer(record)

    @api.get("/v1/plans/proposals", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def proposals() -> Response:
        return json_answer(rebalancing.view() | {"actions": history.actions(50)})

    @api.post("/v1/plans/proposals/{number}/approve", dependencies=[needs(Role.OPERATOR)])
    async def approve(number: int, request: Request) -> Response:
        return json_answer(rebalancing.approve(number, _who(request)))

    @api.post("/v1/plans/proposals/{number}/refuse", dependencies=[needs(Role.OPERATOR)])
    async def refuse(number: int, request: Request) -> Response:
        return json_answer(rebalancing.refuse(number, _who(request)))

    @api.get("/v1/plans/replicas", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def replicas() -> Response:
        look = controller.assessment
        if look is None:
            raise ApiError(
                503, "too little traffic was seen to say", code="not_yet_known", retry_after_s=rebalancing.step_s
            )
        return json_answer({"prefill": look.desired_prefill, "decode": look.desired_decode, "at_load": look.load})


def _who(request: Request) -> str:
    principal: Principal = request.scope["prfaas.principal"]
    return principal.name or principal.role.value
