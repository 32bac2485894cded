"""Clusters and their nodes over HTTP. An operator whose key is bound to clusters sees and changes only those."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response

from gateway.answers import bound, json_answer, needs, operator_of, sees, some_clusters
from gateway.clusters import Cluster, ClusterState, Dial
from gateway.errors import ApiError
from gateway.joining.tokens import TOKEN_HOURS, JoinTokens
from gateway.keys import Principal, Role
from gateway.kv_audits import KvAudits
from gateway.registry import Registry
from gateway.terms import ClusterTerms
from gateway.views import cluster_view, node_view
from scheduler.facts import FREE, Prices


class RegisterBody(msgspec.Struct, frozen=True):
    """A cluster to register."""

    name: str
    dial: Dial = Dial.IN
    egress_gbps: float = 0.0
    region: str = ""
    trusted: bool = False
    prices: Prices = FREE
    residency: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


class TermsBody(msgspec.Struct, frozen=True):
    """What is to be different of a cluster's terms; what is left out stays."""

    region: str | msgspec.UnsetType = msgspec.UNSET
    trusted: bool | msgspec.UnsetType = msgspec.UNSET
    prices: Prices | msgspec.UnsetType = msgspec.UNSET
    residency: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    endpoints: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    models: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class RotateBody(msgspec.Struct, frozen=True):
    """How long the new join token holds, and whether the certificates of all who joined before are revoked."""

    hours: float = TOKEN_HOURS
    revoke: bool = False


Viewer = Annotated[Principal, some_clusters(Role.OPERATOR, Role.PLANNER)]
Operator = Annotated[Principal, some_clusters(Role.OPERATOR)]
_ITS_OWN_WORD = frozenset({"prices"})
"""What an operator of one cluster may change about it once it is approved; the rest others rely on."""


def add_cluster_routes(
    api: FastAPI,
    registry: Registry,
    tokens: JoinTokens,
    audits: KvAudits,
    body_of: Callable[[Request, type[Any]], Awaitable[Any]],
) -> None:
    """Add them to ``api``."""

    def seen(one: Cluster) -> dict[str, Any]:
        return cluster_view(registry, audits, one, asyncio.get_running_loop().time())

    @api.get("/v1/clusters")
    async def clusters(viewer: Viewer) -> Response:
        return json_answer({"clusters": [seen(one) for one in registry.clusters if sees(viewer, one.name)]})

    @api.post("/v1/clusters")
    async def register(request: Request, operator: Operator) -> Response:
        body: RegisterBody = await body_of(request, RegisterBody)
        if not sees(operator, body.name):
            raise ApiError(403, f"this key is not bound to {body.name[:63]!r}", param="name", code="cluster_scope")
        told = (body.region, body.trusted, body.prices, body.residency, body.endpoints, body.models)
        state = ClusterState.PENDING if bound(operator) else ClusterState.ACTIVE
        made = registry.register(body.name, body.dial, body.egress_gbps, ClusterTerms(*told), state)
        token = tokens.make(made)
        return json_answer(seen(made) | token, 201)

    @api.get("/v1/clusters/{name}", dependencies=[operator_of(Role.PLANNER)])
    async def cluster(name: str) -> Response:
        return json_answer(seen(registry.cluster(name)))

    @api.patch("/v1/clusters/{name}", dependencies=[operator_of()])
    async def set_terms(name: str, request: Request, operator: Operator) -> Response:
        body: TermsBody = await body_of(request, TermsBody)
        given = {field: value for field, value in msgspec.structs.asdict(body).items() if value is not msgspec.UNSET}
        one = registry.cluster(name)
        others = sorted(given.keys() - _ITS_OWN_WORD)
        if others and bound(operator) and one.state is not ClusterState.PENDING:
            raise ApiError(
                403,
                f"{others[0]} of an approved cluster is an admin's to change",
                param=others[0],
                code="cluster_scope",
            )
        return json_answer(seen(registry.set_terms(name, msgspec.structs.replace(one.terms, **given))))

    @api.delete("/v1/clusters/{name}", dependencies=[operator_of()])
    async def remove(name: str) -> Response:
        return json_answer(seen(registry.remove(name)))

    @api.post("/v1/clusters/{name}/approve", dependencies=[needs(Role.ADMIN)])
    async def approve(name: str) -> Response:
        return json_answer(seen(registry.approve(name)))

    @api.post("/v1/clusters/{name}/drain", dependencies=[operator_of()])
    async def drain(name: str) -> Response:
        return json_answer(seen(registry.set_draining(name, True)))

    @api.post("/v1/clusters/{name}/resume", dependencies=[operator_of()])
    async def resume(name: str, operator: Operator) -> Response:
        if registry.cluster(name).security.flagged and bound(operator):
            raise ApiError(403, f"audits flagged {name!r}; an admin resumes it", param="name", code="cluster_scope")
        return json_answer(seen(registry.set_draining(name, False)))

    @api.post("/v1/clusters/{name}/rotate", dependencies=[operator_of()])
    async def rotate(name: str, request: Request) -> Response:
        body: RotateBody = await body_of(request, RotateBody)
        token = tokens.make(registry.cluster(name), body.hours, body.revoke)
        return json_answer(seen(registry.cluster(name)) | token)

    @api.get("/v1/clusters/{name}/nodes", dependencies=[operator_of(Role.PLANNER)])
    async def cluster_nodes(name: str) -> Response:
        now = asyncio.get_running_loop().time()
        found = registry.nodes(registry.cluster(name).name)
        return json_answer({"nodes": [node_view(registry, node, now) for node in found]})

    @api.get("/v1/nodes")
    async def nodes(viewer: Viewer) -> Response:
        now = asyncio.get_running_loop().time()
        found = [node for node in registry.nodes() if sees(viewer, node.join.cluster)]
        return json_answer({"nodes": [node_view(registry, node, now) for node in found]})
