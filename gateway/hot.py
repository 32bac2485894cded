"""The two generation endpoints, written directly against ASGI: nothing of a web framework lies in their way."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from gateway import request_headers as said
from gateway.admission import Admission, Pass
from gateway.asgi import Receive, Scope, Send, header
from gateway.building import Prompted
from gateway.errors import ApiError, bad_field
from gateway.exchange import JSON, SSE, Exchange, read_json
from gateway.inflight import InFlight
from gateway.keys import Principal, Role
from gateway.life import RequestLife
from gateway.methods import with_implied
from gateway.openai.requests import GenerationRequest, parse_chat, parse_completion
from gateway.openai.responses import Answer
from gateway.request_ids import request_id
from gateway.services import Services
from gateway.tokenizing import Tokenizing
from kvcache.blocks import BLOCK_TOKENS
from kvcache.chain_cache import ChainCache
from kvcache.control import AnswerPart, Finished
from kvcache.tracing import part
from kvcache.wire import Role as NodeRole
from scheduler.facts import RequestFacts
from scheduler.sizes import size_facts

log = logging.getLogger(__name__)

Parse = Callable[[bytes], GenerationRequest]

SHORT_TOKENS = 2048
"""The blocks of a prompt up to this length are named at once: a thread would take longer to begin with it."""
READ_GRACE_S = 5.0
"""How long after its deadline an answer that is ready may still wait for a client that does not read."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One generation endpoint: its path and how its body is parsed."""

    path: str
    parse: Parse


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (Endpoint("/v1/completions", parse_completion), Endpoint("/v1/chat/completions", parse_chat))
}


class Elsewhere(Protocol):
    """Whoever answers for models that are not this gateway's own."""

    def takes(self, body: bytes) -> bool:
        """Whether a request is for it."""

    async def answer(self, exchange: Exchange, principal: Principal, admitted: Pass, scope: Scope, data: bytes) -> None:
        """Answer it."""


class Generation:
    """Serves completions and chat completions, whole and streamed; what ``elsewhere`` takes, it answers."""

    def __init__(
        self,
        services: Services,
        tokenizing: Tokenizing,
        admission: Admission,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._s = services
        self._elsewhere = elsewhere
        self._admission = admission
        self._tokenizing = tokenizing
        self._sizes = size_facts(services.model.layout)
        self._chains = ChainCache()
        self.in_flight = InFlight(services.config.max_in_flight, services.waiting)

    async def serve(self, endpoint: Endpoint, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A client that goes away before its end cancels everything done for it."""
        span = self._s.tracer.serve(f"POST {endpoint.path}", header(scope, b"traceparent") or "")
        exchange = Exchange(endpoint.path, request_id(scope), send, span)
        span.note({"http.route": endpoint.path, "prfaas.request_id": exchange.request_id})
        began = time.perf_counter()
        self.in_flight.enter()
        self._s.metrics.running.inc()
        try:
            await self._guarded(exchange, endpoint.parse, principal, scope, receive)
        finally:
            self.in_flight.leave()
            self._s.metrics.running.dec()
            self._s.metrics.duration.labels(endpoint.path).observe(time.perf_counter() - began)
            self._s.metrics.requests.labels(endpoint.path, exchange.route, str(exchange.status)).inc()
            exchange.close_span()

    async def _guarded(
        self, exchange: Exchange, parse: Parse, principal: Principal, scope: Scope, receive: Receive
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._check(principal, scope)
            await self._admission.prepare(principal)
            admitted = self._admission.begin(principal, loop.time())
        except ApiError as error:
            await exchange.refuse(error)
            return
        exchange.add_headers(admitted.headers(loop.time()))
        try:
            await self._admitted(exchange, parse, principal, admitted, scope, receive)
        finally:
            admitted.end(None, False, loop.time())

    async def _admitted(
        self,
        exchange: Exchange,
        parse: Parse,
        principal: Principal,
        admitted: Pass,
        scope: Scope,
        receive: Receive,
    ) -> None:
        try:
            body = await read_json(scope, receive, self._s.config.max_body_bytes)
            if self._elsewhere is not None and self._elsewhere.takes(body):
                work = asyncio.create_task(self._elsewhere.answer(exchange, principal, admitted, scope, body))
            else:
                work = asyncio.create_task(self._answer(exchange, parse, principal, admitted, scope, body))
            del body
        except ApiError as error:
            await exchange.refuse(error)
            return
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done() and not exchange.complete:
                work.cancel()
                exchange.gone()
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    def _check(self, principal: Principal, scope: Scope) -> None:
        if scope["method"] != "POST":
            text = f"{scope['path']} takes POST, not {scope['method']}"
            raise ApiError(405, text, code="method_not_allowed", allow=with_implied({"POST"}))
        if said.measures(scope):
            if not principal.may(Role.PLANNER):
                raise ApiError(
                    403, f"{said.MEASURE} needs a key with role planner", param=said.MEASURE, code="role_forbidden"
                )
        elif not principal.may(Role.CLIENT):
            raise ApiError(403, f"a key with role {principal.role} may not generate", code="role_forbidden")
        self.in_flight.check()

    async def _answer(
        self,
        exchange: Exchange,
        parse: Parse,
        principal: Principal,
        admitted: Pass,
        scope: Scope,
        body: bytes,
    ) -> None:
        life: RequestLife | None = None
        outcome = "failed"
        try:
            with part(exchange.span, "parse"):
                request = parse(body)
            prompted = await self._prompt(exchange, request, principal, admitted, scope)
            # while it waits, a request is its tokens
            del body
            request = replace(request, text=None, token_ids=None, messages=None)
            life = RequestLife(self._s, prompted)
            answer = Answer(
                request,
                prompted.facts.request_id,
                int(time.time()),
                self._s.model.system_fingerprint,
                prompted.token_ids,
                self._s.model.token_text,
            )
            first = await life.first()
            exchange.took(life)
            async with asyncio.timeout_at(life.deadline + READ_GRACE_S):
                if request.stream:
                    await self._stream(exchange, answer, life, first)
                else:
                    await self._whole(exchange, answer, life, first)
        except TimeoutError:
            outcome = "slow_client"
            log.warning("client does not read client_id=%s", exchange.request_id)
        except ApiError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:
            outcome = "disconnected"
            raise
        except Exception:
            log.exception("request broke client_id=%s", exchange.request_id)
            await exchange.refuse(ApiError(500, "internal error", code="internal_error"))
        finally:
            if life is not None:
                life.close(outcome)
                exchange.ended(life.finished)
                admitted.end(life.spoken, life.finished is not None, asyncio.get_running_loop().time())
                self._count(life)

    async def _whole(self, exchange: Exchange, answer: Answer, life: RequestLife, first: AnswerPart) -> None:
        item = first
        while not isinstance(item, Finished):
            answer.add(item)
            item = await life.following()
        await exchange.respond(200, JSON, answer.whole(item))

    async def _stream(self, exchange: Exchange, answer: Answer, life: RequestLife, first: AnswerPart) -> None:
        await exchange.open(SSE)
        item = first
        while not isinstance(item, Finished):
            data = answer.chunk(item)
            if data:
                await exchange.write(data)
            item = await life.following()
        await exchange.write(answer.end(item))
        await exchange.end()

    async def _prompt(
        self, exchange: Exchange, request: GenerationRequest, principal: Principal, admitted: Pass, scope: Scope
    ) -> Prompted:
        """Everything that can refuse a request before it is routed. Raises ApiError."""
        if not (self._s.model.answers_to(request.model) and principal.may_use(request.model)):
            raise ApiError(
                404,
                f"the model {request.model[:80]!r} does not exist, or this key may not use it",
                param="model",
                code="model_not_found",
            )
        hint, hint_cluster = said.route_hint(scope, principal, [one.name for one in self._s.registry.clusters])
        quality, session, slo = said.quality(scope), said.session(scope), said.ttft_slo(scope)
        self._check_sampling(request)
        with part(exchange.span, "tokenize"):
            token_ids = await self._token_ids(request)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=self._room(request, len(token_ids)))
        now = asyncio.get_running_loop().time()
        bounded = bool(request.max_tokens_field)
        expected = admitted.reserve(len(token_ids), request.n * sampling.max_tokens, bounded, now)
        facts = RequestFacts(
            request_id=secrets.token_hex(12),
            prompt_tokens=len(token_ids),
            sizes=self._sizes,
            chunk_tokens=self._s.registry.chunk_tokens or 0,
            hint=hint,
            hint_cluster=hint_cluster,
            allowed_clusters=principal.clusters,
            quality=quality,
            barred_clusters=principal.limits.barred,
            regions=principal.limits.regions,
            trusted_only=principal.limits.trusted_only or principal.limits.share_cache,
            tenant=principal.tenant,
            session_nodes=self._s.affinity.nodes(principal.tenant, session, now),
        )
        names = await self._names(token_ids, facts)
        return Prompted(
            exchange.request_id,
            exchange.path,
            facts,
            token_ids,
            sampling,
            names,
            session,
            said.measures(scope),
            admitted.account,
            admitted.weight,
            request.priority,
            expected,
            slo,
            request.n,
            exchange.span,
        )

    async def _names(self, token_ids: tuple[int, ...], facts: RequestFacts) -> tuple[bytes, ...]:
        """Names of the prompt's full blocks; its last token is always computed, so it is in none."""
        if len(token_ids) <= BLOCK_TOKENS:
            return ()
        fingerprint = self._s.model.fingerprint.digest()

        def work() -> list[bytes]:
            return self._chains.block_hashes(
                token_ids[:-1], BLOCK_TOKENS, fingerprint=fingerprint, salt=facts.tenant, lora=facts.lora
            )

        return tuple(work() if len(token_ids) <= SHORT_TOKENS else await self._tokenizing.run(work))

    async def _token_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        if request.messages is not None:
            token_ids = tuple(await self._tokenizing.encode_chat(request.messages))
        elif request.text is not None:
            token_ids = tuple(await self._tokenizing.encode(request.text))
        else:
            assert request.token_ids is not None
            token_ids = request.token_ids
            if len(token_ids) >= self._s.registry.context_tokens:
                return token_ids  # too many to look at: they are refused by their number
            vocab = self._s.model.vocab_size
            wrong = next((at for at, token in enumerate(token_ids) if not 0 <= token < vocab), None)
            if wrong is not None:
                where = f"prompt[{wrong}]"
                raise bad_field(where, f"{where}: {token_ids[wrong]} is not a token id below {vocab}")
        if not token_ids:
            raise bad_field(request.prompt_field, "the prompt has no tokens")
        return token_ids

    def _check_sampling(self, request: GenerationRequest) -> None:
        """Raise ApiError for what this model has no token for, or a node that may speak the answer does not know."""
        sampling, vocab = request.sampling, self._s.model.vocab_size
        for token, _ in sampling.logit_bias:
            if token >= vocab:
                raise bad_field(f"logit_bias.{token}", f"logit_bias.{token}: not a token id below {vocab}")
        if request.n == 1 and not sampling.adjusts:
            return
        nodes = self._s.registry.nodes(self._s.registry.local_cluster, NodeRole.DECODE)
        most = min((node.join.max_answers for node in nodes if node.accepting), default=request.n)
        if not most:
            text = "a decode node here knows neither n nor penalties, min_p and logit_bias; leave them out or update it"
            raise bad_field(request.newest_field, text, code="unsupported_parameter")
        if request.n > most:
            raise bad_field("n", f"n is {request.n}; the decode nodes here give at most {most} answers to one prompt")

    def _room(self, request: GenerationRequest, prompt_tokens: int) -> int:
        """How many tokens may be generated. Raises ApiError where prompt and answer do not fit the context."""
        context = self._s.registry.context_tokens
        left = context - prompt_tokens
        if left < 1:
            raise bad_field(
                request.prompt_field,
                f"{request.prompt_field}: {prompt_tokens} tokens; the context is {context}, answer included",
                code="context_length_exceeded",
            )
        if request.max_tokens is None:
            return left
        if request.max_tokens > left and request.max_tokens_field:
            raise bad_field(
                request.max_tokens_field,
                f"{request.max_tokens_field} is {request.max_tokens}, but after a prompt of {prompt_tokens} tokens "
                f"only {left} of the context of {context} are left",
                code="context_length_exceeded",
            )
        return min(left, request.max_tokens)

    def _count(self, life: RequestLife) -> None:
        done = life.finished
        if done is not None:
            self._s.metrics.prompt_tokens.inc(done.prompt_tokens)
            self._s.metrics.generation_tokens.inc(done.completion_tokens)
            self._s.metrics.cached_tokens.inc(done.cached_tokens)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
