"""What each operation reads and answers, as far as its route does not say so itself.

A test holds this list against the routes: neither may have what the other lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.cluster_routes import RegisterBody, RotateBody, TermsBody
from gateway.joining.routes import EnrolBody
from gateway.key_routes import KeyBody, KeyChange, KeyMade, KeyRevoked
from gateway.openai.requests import ChatBody, CompletionBody
from gateway.openapi.answers import CHAT, COMPLETION, GENERATION_HEADERS, having
from gateway.rebalance_routes import RoleBody
from gateway.terms import TenantTerms
from gateway.text_routes import DetokenizeBody, Detokenized, ModelList, ModelView, TokenizeBody, Tokenized
from scheduler.what_if.question import Question

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Operation:
    """``answer`` is a type, or a JSON schema; ``media`` are further forms of the same answer, which are no JSON.

    ``errors`` are those of its own beside what any request may get, ``same_form`` those that look like the answer.
    """

    summary: str
    answer: Any
    body: Any = None
    status: int = 200
    errors: tuple[int, ...] = ()
    media: tuple[str, ...] = ()
    json: bool = True
    headers: tuple[str, ...] = ()
    same_form: tuple[int, ...] = ()


UNTOLD = Operation("", having())
"""Of a route that nothing is said of here."""
_CLUSTER = having("name", "local", "dial", "state", "nodes", "accepting", "link")
_KEY = having("id", "name", "role", "clusters", "models", "expires", "token_budget", "tokens_used", "created")
_TENANT = having("name", "weight", "requests_per_minute", "tokens_per_minute", "concurrency")
_STATUS = having("ready", "reason", "model", "queue", "clusters", "nodes", "time")

GENERATION: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        "Complete a prompt",
        COMPLETION,
        CompletionBody,
        errors=(404, 429, 503, 504),
        media=("text/event-stream",),
        headers=GENERATION_HEADERS,
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation",
        CHAT,
        ChatBody,
        errors=(404, 429, 503, 504),
        media=("text/event-stream",),
        headers=GENERATION_HEADERS,
    ),
}
"""Answered below the web framework, so that no route of it describes them."""

ROUTES: dict[tuple[str, str], Operation] = {
    ("GET", "/live"): Operation("Whether the process answers", having("status")),
    ("GET", "/ready"): Operation("Whether requests can be served", having("status"), errors=(503,), same_form=(503,)),
    ("GET", "/health_generate"): Operation("Try a generation", having("status"), errors=(503,), same_form=(503,)),
    ("GET", "/metrics"): Operation("Prometheus metrics", None, media=("text/plain",), json=False),
    ("GET", "/openapi.json"): Operation("This document", having("openapi", "info", "paths")),
    ("GET", "/v1/models"): Operation("The models of this key", ModelList),
    ("GET", "/v1/models/{name}"): Operation("One model", ModelView, errors=(404,)),
    ("POST", "/tokenize"): Operation(
        "Token ids of a text or a conversation", Tokenized, TokenizeBody, errors=(404, 503)
    ),
    ("POST", "/detokenize"): Operation("The text of token ids", Detokenized, DetokenizeBody, errors=(404, 503)),
    ("GET", "/v1/clusters"): Operation("All clusters", having("clusters")),
    ("POST", "/v1/clusters"): Operation("Register a cluster", _CLUSTER, RegisterBody, status=201, errors=(409, 503)),
    ("GET", "/v1/clusters/{name}"): Operation("One cluster", _CLUSTER, errors=(404,)),
    ("PATCH", "/v1/clusters/{name}"): Operation("Change its terms", _CLUSTER, TermsBody, errors=(404, 409, 503)),
    ("DELETE", "/v1/clusters/{name}"): Operation("Remove it", _CLUSTER, errors=(404, 409, 503)),
    ("POST", "/v1/clusters/{name}/approve"): Operation("Approve it", having(), errors=(404, 409, 503)),
    ("POST", "/v1/clusters/{name}/drain"): Operation("Send it no new work", _CLUSTER, errors=(404, 409, 503)),
    ("POST", "/v1/clusters/{name}/resume"): Operation("Send it work again", _CLUSTER, errors=(404, 409, 503)),
    ("POST", "/v1/clusters/{name}/rotate"): Operation(
        "Replace its join token", having(), RotateBody, errors=(404, 409, 503)
    ),
    ("GET", "/v1/clusters/{name}/nodes"): Operation("Its nodes", having("nodes"), errors=(404,)),
    ("GET", "/v1/join/roots"): Operation("Roots that nodes are to believe", having("roots"), errors=(404,)),
    ("POST", "/v1/join"): Operation(
        "A certificate for a joining node", having("certificate", "roots", "until"), EnrolBody, errors=(404, 503)
    ),
    ("GET", "/v1/engines"): Operation("Engines that were not started by prfaas", having()),
    ("GET", "/v1/nodes"): Operation("All joined nodes", having("nodes")),
    ("POST", "/v1/nodes/{node_id}/role"): Operation(
        "Convert a node", having(), RoleBody, status=202, errors=(404, 409, 503)
    ),
    ("GET", "/v1/status"): Operation("The gateway as it is now", _STATUS),
    ("GET", "/v1/topology"): Operation("Machines and the ways between nodes", having()),
    ("GET", "/v1/conversions"): Operation("Conversions of nodes", having("conversions")),
    ("GET", "/v1/conversions/{number}"): Operation("One conversion", having(), errors=(404,)),
    ("GET", "/v1/plans/proposals"): Operation("What the long-term loop proposes", having("mode", "proposals")),
    ("POST", "/v1/plans/proposals/{number}/approve"): Operation("Approve one", having(), errors=(404, 409, 503)),
    ("POST", "/v1/plans/proposals/{number}/refuse"): Operation("Refuse one", having(), errors=(404, 409, 503)),
    ("GET", "/v1/plans/replicas"): Operation(
        "Nodes that each stage should have", having("prefill", "decode", "at_load"), errors=(503,)
    ),
    ("POST", "/v1/plans/what-if"): Operation(
        "What would be", having(), Question, errors=(429, 503, 504), media=("application/x-ndjson",)
    ),
    ("GET", "/v1/reports/rebalancing"): Operation(
        "The rebalancing report", having(), errors=(503,), media=("text/csv", "text/html")
    ),
    ("GET", "/v1/decisions"): Operation("Recent decisions", having("decisions")),
    ("GET", "/v1/decisions/export"): Operation("All decisions", None, media=("application/jsonl",), json=False),
    ("GET", "/v1/decisions/{name}"): Operation("Why a request went where it did", having("id", "at"), errors=(404,)),
    ("GET", "/v1/overview"): Operation("What the page shows of it all", having("who", "ready", "model")),
    ("GET", "/v1/audit"): Operation("What operators did, and who was turned away", having("entries")),
    ("POST", "/v1/reload"): Operation("Read the configuration again", having("changed"), errors=(409,)),
    ("GET", "/v1/keys"): Operation("All keys", having("keys")),
    ("POST", "/v1/keys"): Operation("Make a key", KeyMade, KeyBody, status=201, errors=(503,)),
    ("GET", "/v1/keys/{key_id}"): Operation("One key", _KEY, errors=(404,)),
    ("PATCH", "/v1/keys/{key_id}"): Operation("Change what a key permits", _KEY, KeyChange, errors=(404, 503)),
    ("DELETE", "/v1/keys/{key_id}"): Operation("Revoke a key", KeyRevoked, errors=(404, 503)),
    ("GET", "/v1/tenants"): Operation("What is said of tenants", having("tenants")),
    ("PUT", "/v1/tenants/{name}"): Operation("Say what holds for a tenant", _TENANT, TenantTerms, errors=(503,)),
    ("DELETE", "/v1/tenants/{name}"): Operation("Forget that", having("name", "removed"), errors=(404, 503)),
}
