"""Requests to models whose engines split prefill and decode: read loosely, since engines know their own fields."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway import refusals
from gateway import request_headers as said
from gateway.admission import Pass
from gateway.building import Prompted
from gateway.caller import JSON, Caller
from gateway.dialects.fields import RESERVED
from gateway.dialects.parts import MOST_PARTS, Part, count, parts, samples
from gateway.dialects.protocol import Body
from gateway.dialects.table import SPLIT
from gateway.ending import READ_GRACE_S, Ending
from gateway.errors import ApiError, bad_field
from gateway.fleet.asked import Asked, EngineRefused, Splits
from gateway.fleet.config import DialectName
from gateway.fleet.life import SplitLife
from gateway.fleet.prompts import about, token_ids
from gateway.keys import Principal
from gateway.openai.requests import decode_json
from gateway.prompting import BlockNames
from gateway.tokenizing import Tokenizing
from kvcache.control import Sampling
from scheduler.facts import RequestFacts
from scheduler.sizes import size_facts

MOST_OUTPUT = 1 << 16
"""Tokens that an answer without a bound is taken to have at most."""
_MODEL = msgspec.json.Decoder(dict[str, msgspec.Raw])


class SplitServing:
    """Answers for models that split engines serve. One of these serves all requests of a gateway."""

    def __init__(self, splits: Splits, tokenizing: Tokenizing) -> None:
        self._splits = splits
        self._s = splits.services
        self._tokenizing = tokenizing
        self._sizes = size_facts(self._s.model.layout)
        self._names = BlockNames(self._s.model, tokenizing)

    def takes(self, body: bytes) -> bool:
        """Whether this body asks for a model that is served here; what cannot be read is for others to refuse."""
        if not self._splits.calls.fleet.splits:
            return False
        try:
            model = msgspec.json.decode(_MODEL.decode(body).get("model", b"null"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        name = self._splits.calls.fleet.dialect(model) if isinstance(model, str) else None
        return name is not None and name.splits

    async def answer(self, caller: Caller, principal: Principal, admitted: Pass) -> None:
        """Answer one request."""
        with Ending(caller, admitted, self._s.metrics) as ending:
            prompted, asked = await self._read(caller, principal, admitted)
            life = ending.life = SplitLife(self._splits, prompted, asked)
            try:
                await life.begin()
                caller.took(life.record.route)
                async with asyncio.timeout_at(life.deadline + READ_GRACE_S):
                    if asked.streams:
                        await _streamed(caller, life)
                    else:
                        caller.respond(200, JSON, msgspec.json.encode(await life.whole()))
            except EngineRefused as refused:
                caller.respond(refused.status, JSON, _error_body(refused))

    async def _read(self, caller: Caller, principal: Principal, admitted: Pass) -> tuple[Prompted, Asked]:
        """Everything that can refuse a request before it is routed. Raises ApiError."""
        scope = caller.scope
        body = decode_json(await caller.body())
        for field in RESERVED:
            if body.get(field) is not None:
                raise bad_field(field, f"{field}: the gateway says where engines find KV; leave it out")
        if body.get("stream") is not None and type(body["stream"]) is not bool:
            raise bad_field("stream", "stream: must be true or false; engines take more for true than others do")
        model = body["model"]
        fleet = self._splits.calls.fleet
        name = fleet.dialect(model)
        if name is None or not name.splits:
            raise ApiError(404, f"no engine serves {model!r} any more", param="model", code="model_not_found")
        if not principal.may_use(model):
            raise refusals.no_model(model)
        clusters = [engine.config.cluster for engine in fleet.of(model)]
        hint, hint_cluster = said.route_hint(scope, principal, clusters)
        quality, session, slo = said.quality(scope), said.session(scope), said.ttft_slo(scope)
        ids = await token_ids(body, self._tokenizing)
        tokens = about(body) if ids is None else len(ids)
        asked = _asked(name, model, body)
        now = asyncio.get_running_loop().time()
        most = _most(body)
        bound = samples(body) * (most or MOST_OUTPUT)
        expected = admitted.reserve(tokens, bound, most is not None, now)
        facts = RequestFacts(
            request_id=secrets.token_hex(12),
            prompt_tokens=tokens,
            sizes=self._sizes,
            hint=hint,
            hint_cluster=hint_cluster,
            allowed_clusters=principal.clusters,
            quality=quality,
            barred_clusters=principal.limits.barred,
            regions=principal.limits.regions,
            trusted_only=principal.limits.trusted_only or principal.limits.share_cache,
            tenant=principal.tenant,
            session_nodes=self._s.affinity.nodes(principal.tenant, session, now),
            whole=asked.whole is not None,
        )
        priority = body.get("priority")
        prompted = Prompted(
            caller.request_id,
            caller.path,
            facts,
            (0,) * tokens if ids is None else ids,
            Sampling(max_tokens=most or MOST_OUTPUT),
            () if ids is None else await self._names.of(ids, facts),
            session,
            said.measures(scope),
            admitted.account,
            admitted.weight,
            priority if type(priority) is int else 0,
            expected,
            slo,
            span=caller.span,
        )
        return prompted, asked


async def _streamed(caller: Caller, life: SplitLife) -> None:
    caller.stream()
    async for chunk in life.chunks():
        caller.send(chunk)
        await caller.room()
    caller.end(b"")


def _asked(name: DialectName, model: str, body: dict[str, Any]) -> Asked:
    """What to ask the engines for: as the client, but streams always tell their usage. Raises ApiError."""
    dialect, batches = SPLIT[name], name is DialectName.SGLANG
    sent: Body = body
    if body.get("stream") is True:
        options = body.get("stream_options")
        sent = body | {"stream_options": (options if isinstance(options, dict) else {}) | {"include_usage": True}}
    whole = dialect.whole(body)
    if whole is None and count(body, batches) > MOST_PARTS:
        if batches:
            raise bad_field("n", f"n: {samples(body)} answers, at most {MOST_PARTS} are given here")
        whole = "many_parts"
    of = (Part(sent),) if whole is not None else parts(sent, batches)
    return Asked(model, name, dialect, of, body, whole)


def _most(body: Mapping[str, Any]) -> int | None:
    """Tokens that each answer may have, where the client bounds it."""
    for field in ("max_completion_tokens", "max_tokens"):
        value = body.get(field)
        if type(value) is int and value > 0:
            return value
    return None


def _error_body(refused: EngineRefused) -> bytes:
    """The engine's own words where they are JSON, else ours: its client expects an object with an error."""
    try:
        msgspec.json.decode(refused.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = ApiError(refused.status, "the engine refused the request without a reason", code="engine_refused")
        return msgspec.json.encode(error.body())
    return refused.body
