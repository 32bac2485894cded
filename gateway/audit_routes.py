"""The audit log over HTTP."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import FastAPI, Query, Response

from gateway.answers import json_answer, some_clusters
from gateway.audit import AuditLog
from gateway.keys import Principal, Role

Operator = Annotated[Principal, some_clusters(Role.OPERATOR)]


def add_audit_routes(api: FastAPI, audit: AuditLog) -> None:
    """Add them to ``api``. An operator of some clusters sees what concerns those."""

    @api.get("/v1/audit")
    async def entries(operator: Operator, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
        found = audit.recent(limit, None if operator.role is Role.ADMIN else operator.clusters)
        return json_answer({"entries": [msgspec.to_builtins(entry) for entry in found]})
