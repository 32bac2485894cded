"""The two generation endpoints, answered below ASGI: nothing of a web framework lies in their way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs

from gateway import refusals
from gateway import request_headers as said
from gateway.access import Access
from gateway.admission import Admission, Pass
from gateway.asgi import header
from gateway.bodies import check_form
from gateway.caller import JSON, Caller
from gateway.cors import Cors
from gateway.ending import Ending
from gateway.errors import ApiError
from gateway.inflight import InFlight
from gateway.keys import Principal, Role
from gateway.life import RequestLife
from gateway.openai.requests import GenerationRequest, parse_chat, parse_completion
from gateway.openai.responses import Answer
from gateway.prompting import Prompting
from gateway.request_ids import request_id
from gateway.services import Services
from gateway.tokenizing import Tokenizing
from kvcache.control import AnswerEnded, AnswerPart, Delta
from kvcache.tracing import part

log = logging.getLogger(__name__)

Parse = Callable[[bytes], GenerationRequest]


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

    async def answer(self, caller: Caller, principal: Principal, admitted: Pass) -> None:
        """Answer it."""


class Generation:
    """Serves completions and chat completions, whole and streamed; what ``elsewhere`` takes, it answers."""

    def __init__(
        self,
        services: Services,
        tokenizing: Tokenizing,
        access: Access,
        admission: Admission,
        cors: Cors,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._s = services
        self._access = access
        self._elsewhere = elsewhere
        self._admission = admission
        self._cors = cors
        self._prompting = Prompting(services, tokenizing)
        self.in_flight = InFlight(services.config.max_in_flight, services.waiting)

    @property
    def max_body_bytes(self) -> int:
        """What a body may have."""
        return self._s.config.max_body_bytes

    async def serve(self, caller: Caller) -> None:
        """Answer one request. Cancelled when its client is gone, which ends everything done for it."""
        caller.told = self._cors.headers(caller.scope)
        try:
            principal = self._access.caller(caller.scope)
        except ApiError as error:
            caller.refuse(error)
            return
        await self.answer(caller, principal)

    async def answer(self, caller: Caller, principal: Principal) -> None:
        """Answer a request of somebody who is known."""
        metrics, scope = self._s.metrics, caller.scope
        caller.named(request_id(scope))
        span = caller.span = self._s.tracer.serve(f"POST {caller.path}", header(scope, b"traceparent") or "")
        span.note({"http.route": caller.path, "prfaas.request_id": caller.request_id})
        began = time.perf_counter()
        self.in_flight.enter()
        metrics.running.inc()
        try:
            await self._let_in(caller, principal)
        except ApiError as error:
            caller.refuse(error)
        finally:
            self.in_flight.leave()
            metrics.running.dec()
            metrics.duration.labels(caller.path).observe(time.perf_counter() - began)
            metrics.requests.labels(caller.path, caller.route, str(caller.status)).inc()
            span.note({"http.response.status_code": caller.status, "prfaas.route": caller.route})
            span.end("" if caller.status < 500 else f"HTTP {caller.status}")

    async def _let_in(self, caller: Caller, principal: Principal) -> None:
        """Raises ApiError where the request is not looked at."""
        loop = asyncio.get_running_loop()
        self._check(caller, principal)
        if self._admission.shared:
            await loop.create_task(self._admission.prepare(principal))
        admitted = self._admission.begin(principal, loop.time())
        caller.told += admitted.headers(loop.time())
        try:
            check_form(caller.scope)
            body = await caller.body()
            elsewhere = self._elsewhere if self._elsewhere is not None and self._elsewhere.takes(body) else None
            caller.put_back(body)
            del body
            if elsewhere is not None:
                await loop.create_task(elsewhere.answer(caller, principal, admitted))
            else:
                await self._answer(caller, principal, admitted)
        finally:
            admitted.end(None, False, loop.time())

    def _check(self, caller: Caller, principal: Principal) -> None:
        if said.measures(caller.scope):
            if not principal.may(Role.PLANNER):
                raise ApiError(
                    403, f"{said.MEASURE} needs a key with role planner", param=said.MEASURE, code="role_forbidden"
                )
        elif not principal.may(Role.CLIENT):
            raise refusals.no_role(principal)
        self.in_flight.check()

    async def _answer(self, caller: Caller, principal: Principal, admitted: Pass) -> None:
        with Ending(caller, admitted, self._s.metrics) as ending:
            with part(caller.span, "parse"):
                request = ENDPOINTS[caller.path].parse(await caller.body())
            prompted = await self._prompting.prompted(caller, request, principal, admitted)
            # while it waits, a request is its tokens
            request = structs.replace(request, text=None, token_ids=None, messages=None)
            life = ending.life = RequestLife(self._s, prompted)
            answer = Answer(
                request,
                prompted.facts.request_id,
                int(time.time()),
                self._s.model.system_fingerprint,
                prompted.token_ids,
                self._s.model.token_text,
            )
            first = await life.first()
            caller.took(life.record.route)
            if request.stream:
                await _streamed(caller, answer, life, first)
            else:
                done = await life.rest(first, answer.add)
                caller.respond(200, JSON, answer.whole(done))


async def _streamed(caller: Caller, answer: Answer, life: RequestLife, first: AnswerPart) -> None:
    """Each piece leaves in the moment in which its node said it, unless the client does not read."""

    def hear(piece: Delta | AnswerEnded) -> None:
        data = answer.chunk(piece)
        if data:
            caller.send(data)

    caller.stream()
    caller.flows(life.hold, life.go_on)
    try:
        done = await life.rest(first, hear)
    finally:
        caller.flows(None, None)
    caller.end(answer.end(done))
