"""Operator, planner and tooling routes, on FastAPI. Callers were authenticated before they get here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from gateway.answers import json_answer, needs
from gateway.bodies import read_json
from gateway.budgets import Budgets
from gateway.cluster_routes import add_cluster_routes
from gateway.clusters import Cluster
from gateway.decision_routes import add_decision_routes
from gateway.error_handlers import add_error_handlers
from gateway.joining.tokens import JoinTokens
from gateway.key_routes import add_key_routes
from gateway.keys import KeyBook, Role
from gateway.kv_index import KvIndex
from gateway.metrics import CONTENT_TYPE
from gateway.openai.requests import convert, decode_json
from gateway.rebalance_routes import add_rebalance_routes
from gateway.rebalancing import Rebalancing
from gateway.report.gathering import ReportSource
from gateway.report_routes import add_report_routes
from gateway.services import Services
from gateway.shared.sharing import Sharing
from gateway.text_routes import ModelViews, add_text_routes
from gateway.tokenizing import Tokenizing
from gateway.views import cluster_view, node_view, prefix_view
from gateway.web.routes import add_page
from gateway.what_if_routes import add_what_if_routes
from kvcache.wire import Role as NodeRole


def build_routes(
    services: Services,
    keys: KeyBook,
    budgets: Budgets,
    tokenizing: Tokenizing,
    kv_index: KvIndex,
    rebalancing: Rebalancing,
    tokens: JoinTokens,
    ready: Callable[[], str | None],
    sharing: Sharing,
    engine_models: Callable[[], Sequence[str]],
) -> FastAPI:
    """The web application for everything but generation.

    ``ready`` names what keeps the gateway from serving, ``engine_models`` what external engines serve.
    """
    api = FastAPI(title="prfaas", docs_url=None, redoc_url=None, openapi_url=None)
    registry, decisions, model = services.registry, services.decisions, services.model
    views = ModelViews(model, lambda: registry.context_tokens, engine_models)

    add_error_handlers(api)

    def seen(one: Cluster) -> dict[str, Any]:
        return cluster_view(registry, services.audits, one, asyncio.get_running_loop().time())

    async def body_of(request: Request, kind: type[Any]) -> Any:
        data = await read_json(request.scope, request.receive, services.config.max_body_bytes)
        return convert(decode_json(data), kind)

    @api.get("/live")
    async def live() -> Response:
        return json_answer({"status": "live"})

    @api.get("/ready")
    async def is_ready() -> Response:
        missing, trouble = ready(), sharing.trouble
        degraded = {} if trouble is None else {"degraded": trouble}
        if missing is None:
            return json_answer({"status": "ready"} | degraded)
        return json_answer({"status": "not ready", "reason": missing} | degraded, 503)

    @api.get("/metrics", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def metrics() -> Response:
        return Response(await services.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    add_text_routes(api, model, views, tokenizing, body_of)

    # ---- clusters and nodes

    add_cluster_routes(api, registry, tokens, services.audits, body_of)

    def whole() -> dict[str, Any]:
        missing, now = ready(), asyncio.get_running_loop().time()
        return {
            "ready": missing is None,
            "shared": sharing.view(),
            "reason": missing,
            "model": views.own(),
            "threshold_tokens": services.threshold.tokens,
            "fallback": services.config.fallback.value,
            "chunk_tokens": registry.chunk_tokens,
            "prefill_nodes": len(registry.nodes(role=NodeRole.PREFILL)),
            "decode_nodes": len(registry.nodes(role=NodeRole.DECODE)),
            "queue": services.waiting.view(),
            "prefix_index": prefix_view(kv_index),
            "clusters": [seen(cluster) for cluster in registry.clusters],
            "nodes": [node_view(registry, node, now) for node in registry.nodes()],
            "decisions_unwritten": decisions.unwritten,
            "time": time.time(),
        }

    @api.get("/v1/status", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def status() -> Response:
        return json_answer(whole())

    add_page(api, whole, rebalancing.view, decisions, lambda: len(keys) > 0)

    add_rebalance_routes(api, rebalancing, body_of)
    kept = ReportSource(decisions, registry, rebalancing)
    add_report_routes(api, kept, model.name)
    add_what_if_routes(api, kept, registry, services.policy.values, body_of)

    add_decision_routes(api, decisions, sharing)

    add_key_routes(api, keys, budgets, body_of)
    return api
