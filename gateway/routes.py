"""Operator, planner and tooling routes, on FastAPI. Callers were authenticated before they get here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway.answers import json_answer, needs
from gateway.decision_routes import add_decision_routes
from gateway.errors import ApiError, bad_field
from gateway.exchange import read_body
from gateway.keys import KeyBook, Role
from gateway.kv_index import KvIndex
from gateway.metrics import CONTENT_TYPE
from gateway.openai.requests import MAX_PROMPT_IDS, chat_messages, convert, decode_json
from gateway.rebalance_routes import add_rebalance_routes
from gateway.rebalancing import Rebalancing
from gateway.registry import Cluster, Dial
from gateway.report.gathering import ReportSource
from gateway.report_routes import add_report_routes
from gateway.services import Services
from gateway.terms import ClusterTerms, KeyLimits
from gateway.tokenizing import Tokenizing
from gateway.views import cluster_view, key_view, node_view, prefix_view
from gateway.what_if_routes import add_what_if_routes
from kvcache.wire import Role as NodeRole
from scheduler.facts import FREE, Prices

PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>prfaas</title>
<h1>prfaas gateway</h1><p>A cross-datacenter Prefill-as-a-Service gateway. The API is OpenAI-compatible:
<code>/v1/completions</code>, <code>/v1/chat/completions</code>, <code>/v1/models</code>.</p>
<p>Operators: <code>prfaas status</code>, <code>prfaas clusters list</code>, <code>/metrics</code>.</p></html>
"""


TokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_PROMPT_IDS)]


class RegisterBody(msgspec.Struct, frozen=True):
    """A cluster to register."""

    name: str
    dial: Dial = Dial.IN
    egress_gbps: float = 0.0
    region: str = ""
    trusted: bool = False
    prices: Prices = FREE


class TermsBody(msgspec.Struct, frozen=True):
    """What is to be different of a cluster's terms; what is left out stays."""

    region: str | msgspec.UnsetType = msgspec.UNSET
    trusted: bool | msgspec.UnsetType = msgspec.UNSET
    prices: Prices | msgspec.UnsetType = msgspec.UNSET


class KeyBody(msgspec.Struct, frozen=True):
    """A key to create."""

    role: Role
    name: str = ""
    route_hint: bool = False
    clusters: list[str] | None = None
    tenant: str | None = None
    share_cache: bool = False
    regions: frozenset[str] | None = None
    barred: frozenset[str] = frozenset()
    trusted_only: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """A text or a conversation to tokenise."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """Token ids to turn into text."""

    tokens: TokenIds
    model: str | None = None


def build_routes(
    services: Services,
    keys: KeyBook,
    tokenizing: Tokenizing,
    kv_index: KvIndex,
    rebalancing: Rebalancing,
    ready: Callable[[], str | None],
) -> FastAPI:
    """The web application for everything but generation. ``ready`` names what keeps the gateway from serving."""
    api = FastAPI(title="prfaas", docs_url=None, redoc_url=None, openapi_url=None)
    registry, decisions, model = services.registry, services.decisions, services.model
    started = int(time.time())

    @api.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        extra = {name.decode(): value.decode() for name, value in error.headers()}
        return json_answer(error.body(), error.status, extra)

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        messages = {404: f"no route {request.url.path}", 405: f"{request.method} is not allowed here"}
        message = messages.get(error.status_code, str(error.detail))
        return json_answer(ApiError(error.status_code, message).body(), error.status_code)

    @api.exception_handler(RequestValidationError)
    async def on_bad_query(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        return json_answer(bad_field(name, f"{name}: {first['msg']}").body(), 400)

    @api.exception_handler(Exception)
    async def on_broken(_: Request, error: Exception) -> Response:
        return json_answer(ApiError(500, "internal error", code="internal_error").body(), 500)

    def seen(one: Cluster) -> dict[str, Any]:
        return cluster_view(registry, one, asyncio.get_running_loop().time())

    async def body_of(request: Request, kind: type[Any]) -> Any:
        data = await read_body(request.scope, request.receive, services.config.max_body_bytes)
        return convert(decode_json(data), kind)

    def check_model(name: str | None) -> None:
        if name is not None and name != model.name:
            raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")

    @api.get("/")
    async def page() -> Response:
        return Response(PAGE, media_type="text/html; charset=utf-8")

    @api.get("/live")
    async def live() -> Response:
        return json_answer({"status": "live"})

    @api.get("/ready")
    async def is_ready() -> Response:
        missing = ready()
        return (
            json_answer({"status": "ready"})
            if missing is None
            else json_answer({"status": "not ready", "reason": missing}, 503)
        )

    @api.get("/metrics", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def metrics() -> Response:
        return Response(services.metrics.render(), headers={"content-type": CONTENT_TYPE})

    # ---- the model

    def model_view() -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": started,
            "owned_by": "prfaas",
            "max_model_len": registry.context_tokens,
            "vocab_size": model.vocab_size,
            "fingerprint": model.fingerprint.parts(),
        }

    @api.get("/v1/models")
    async def models() -> Response:
        return json_answer({"object": "list", "data": [model_view()]})

    @api.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        check_model(name)
        return json_answer(model_view())

    @api.post("/tokenize", dependencies=[needs(Role.CLIENT, Role.OPERATOR)])
    async def tokenize(request: Request) -> Response:
        body: TokenizeBody = await body_of(request, TokenizeBody)
        check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_field("prompt", "give either prompt or messages")
        if body.messages is not None:
            tokens = await tokenizing.encode_chat(chat_messages(body.messages))
        else:
            tokens = await tokenizing.encode(body.prompt or "", body.add_special_tokens)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": registry.context_tokens, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = await tokenizing.run(lambda: [model.token_text.text_of(token) for token in tokens])
        return json_answer(answer)

    @api.post("/detokenize", dependencies=[needs(Role.CLIENT, Role.OPERATOR)])
    async def detokenize(request: Request) -> Response:
        body: DetokenizeBody = await body_of(request, DetokenizeBody)
        check_model(body.model)
        wrong = next((at for at, token in enumerate(body.tokens) if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise bad_field(f"tokens[{wrong}]", f"tokens[{wrong}] is not a token id below {model.vocab_size}")
        return json_answer({"prompt": await tokenizing.decode(body.tokens)})

    # ---- clusters and nodes

    @api.get("/v1/clusters", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def clusters() -> Response:
        return json_answer({"clusters": [seen(cluster) for cluster in registry.clusters]})

    @api.post("/v1/clusters", dependencies=[needs(Role.OPERATOR)])
    async def register(request: Request) -> Response:
        body: RegisterBody = await body_of(request, RegisterBody)
        terms = ClusterTerms(body.region, body.trusted, body.prices)
        return json_answer(seen(registry.register(body.name, body.dial, body.egress_gbps, terms)), 201)

    @api.get("/v1/clusters/{name}", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def cluster(name: str) -> Response:
        return json_answer(seen(registry.cluster(name)))

    @api.patch("/v1/clusters/{name}", dependencies=[needs(Role.OPERATOR)])
    async def set_terms(name: str, request: Request) -> Response:
        body: TermsBody = await body_of(request, TermsBody)
        given = {field: value for field, value in msgspec.structs.asdict(body).items() if value is not msgspec.UNSET}
        terms = msgspec.structs.replace(registry.cluster(name).terms, **given)
        return json_answer(seen(registry.set_terms(name, terms)))

    @api.delete("/v1/clusters/{name}", dependencies=[needs(Role.OPERATOR)])
    async def remove(name: str) -> Response:
        return json_answer(seen(registry.remove(name)))

    @api.post("/v1/clusters/{name}/drain", dependencies=[needs(Role.OPERATOR)])
    async def drain(name: str) -> Response:
        return json_answer(seen(registry.set_draining(name, True)))

    @api.post("/v1/clusters/{name}/resume", dependencies=[needs(Role.OPERATOR)])
    async def resume(name: str) -> Response:
        return json_answer(seen(registry.set_draining(name, False)))

    @api.get("/v1/clusters/{name}/nodes", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def cluster_nodes(name: str) -> Response:
        now = asyncio.get_running_loop().time()
        return json_answer(
            {"nodes": [node_view(registry, node, now) for node in registry.nodes(registry.cluster(name).name)]}
        )

    @api.get("/v1/nodes", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def nodes() -> Response:
        now = asyncio.get_running_loop().time()
        return json_answer({"nodes": [node_view(registry, node, now) for node in registry.nodes()]})

    @api.get("/v1/status", dependencies=[needs(Role.OPERATOR, Role.PLANNER)])
    async def status() -> Response:
        missing, now = ready(), asyncio.get_running_loop().time()
        return json_answer(
            {
                "ready": missing is None,
                "reason": missing,
                "model": model_view(),
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
        )

    add_rebalance_routes(api, rebalancing, body_of)
    kept = ReportSource(decisions, registry, rebalancing)
    add_report_routes(api, kept, model.name)
    add_what_if_routes(api, kept, registry, services.policy.values, body_of)

    add_decision_routes(api, decisions)

    # ---- keys

    @api.get("/v1/keys", dependencies=[needs(Role.ADMIN)])
    async def list_keys() -> Response:
        return json_answer({"keys": [key_view(entry) for entry in keys.entries()]})

    @api.post("/v1/keys", dependencies=[needs(Role.ADMIN)])
    async def create_key(request: Request) -> Response:
        body: KeyBody = await body_of(request, KeyBody)
        if not len(keys) and body.role is not Role.ADMIN:
            raise bad_field("role", "the first key must have role admin, or nobody could make or revoke keys")
        permitted = None if body.clusters is None else frozenset(body.clusters)
        rates = (body.requests_per_minute, body.tokens_per_minute, body.concurrency)
        limits = KeyLimits(body.tenant, body.share_cache, body.regions, body.barred, body.trusted_only, *rates)
        key_id, secret = keys.create(body.name, body.role, body.route_hint, permitted, limits)
        return json_answer({"id": key_id, "key": secret, "role": body.role.value}, 201)

    @api.delete("/v1/keys/{key_id}", dependencies=[needs(Role.ADMIN)])
    async def revoke_key(key_id: str) -> Response:
        if not keys.revoke(key_id):
            raise ApiError(404, f"no key has id {key_id!r}", code="key_not_found")
        return json_answer({"id": key_id, "revoked": True})

    return api
