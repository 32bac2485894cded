"""The door of relayed requests: who asks, what is asked, whether it is let in; then tries at engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gateway import refusals
from gateway.access import Access
from gateway.admission import Admission
from gateway.asgi import header
from gateway.caller import Caller
from gateway.cors import Cors
from gateway.errors import ApiError, bad_field
from gateway.fleet.config import DialectName
from gateway.fleet.engine import Engine
from gateway.fleet.fleet import Fleet
from gateway.inflight import InFlight
from gateway.keys import Principal, Role
from gateway.live import LiveConfig
from gateway.relay.asked import Asked, parse, with_usage
from gateway.relay.engines import Heads
from gateway.relay.figures import RelayFigures
from gateway.relay.headers import lines, to_engine, traced
from gateway.relay.places import Places
from gateway.relay.tries import Shared, Tries, Wanted
from gateway.request_ids import request_id
from gateway.upstream.pool import Pool
from gateway.waiting import WaitingRoom
from kvcache.tracing import NO_TRACER, Tracer
from scheduler.admission.work import NOMINAL, OUTPUT_WEIGHT
from scheduler.retrying import RetryBudget

MOST_OUTPUT = 1 << 16
"""Tokens that an answer without a bound may have, as far as is known here."""


class Relay:
    """Serves callers whose model an external engine answers whole, and hands the others over."""

    def __init__(
        self,
        live: LiveConfig,
        fleet: Fleet,
        access: Access,
        admission: Admission,
        waiting: WaitingRoom,
        in_flight: InFlight,
        figures: RelayFigures,
        places: Places,
        pool: Pool,
        cors: Cors,
        elsewhere: Callable[[Caller, Principal], Awaitable[None]],
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """``elsewhere`` answers for all other models."""
        self._fleet = fleet
        self._live = live
        self._access = access
        self._admission = admission
        self._in_flight = in_flight
        self._figures = figures
        self._cors = cors
        self._elsewhere = elsewhere
        self._tracer = tracer
        self._places = places
        self._shared = Shared(pool, waiting, figures, places, RetryBudget(), Heads())

    @property
    def max_body_bytes(self) -> int:
        """What a body may have."""
        return self._live.now.max_body_bytes

    async def serve(self, caller: Caller) -> None:
        """Answer one request. Cancelled when its client is gone."""
        caller.told = self._cors.headers(caller.scope)
        self._in_flight.enter()  # a body that is still to come counts, too
        try:
            principal = self._access.caller(caller.scope)
            self._in_flight.check()
            body = await caller.body()
        except ApiError as error:
            caller.refuse(error)
            return
        finally:
            self._in_flight.leave()
        asked = parse(body)
        engines = [] if asked is None else self._fleet.of(asked.model)
        if asked is None or not engines or engines[0].config.dialect is not DialectName.OPENAI:
            caller.put_back(body)
            del body
            await self._elsewhere(caller, principal)
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        caller.named(request_id(caller.scope))
        self._in_flight.enter()
        self._figures.began()
        span = self._tracer.serve(f"POST {caller.path}", header(caller.scope, b"traceparent") or "")
        try:
            await self._admitted(caller, principal, asked, body, engines, span.traceparent)
        except ApiError as error:
            caller.refuse(error)
        finally:
            span.note({"http.response.status_code": caller.status, "prfaas.route": caller.route})
            span.end("" if caller.status < 500 else f"HTTP {caller.status}")
            self._in_flight.leave()
            self._figures.ended(caller.path, caller.route, caller.status, loop.time() - began)

    async def _admitted(
        self, caller: Caller, principal: Principal, asked: Asked, body: bytes, engines: list[Engine], traceparent: str
    ) -> None:
        """Raises ApiError."""
        if not principal.may(Role.CLIENT):
            raise refusals.no_role(principal)
        if not principal.may_use(asked.model):
            raise refusals.no_model(asked.model)
        if asked.forbidden is not None:
            raise bad_field(asked.forbidden, f"{asked.forbidden}: where KV is, only the gateway tells engines")
        if self._admission.shared:
            await asyncio.create_task(self._admission.prepare(principal))
        loop = asyncio.get_running_loop()
        now = loop.time()
        admitted = self._admission.begin(principal, now)
        caller.told += admitted.headers(now)
        spoken, prompt = None, asked.prompt_tokens(len(body))
        whole = False
        try:
            bound = asked.bound
            expected = admitted.reserve(prompt, bound or MOST_OUTPUT, bound is not None, now)
            strips = admitted.counts_tokens and not asked.tells_usage
            wanted = Wanted(
                with_usage(body) if strips else body,
                lines((*to_engine(traced(caller.scope["headers"], traceparent)), caller.extra[0])),
                asked.stream is True,
                strips,
                now + self._live.now.request_timeout_s,
                admitted.account,
                admitted.weight,
                asked.urgency,
                prompt,
                NOMINAL.seconds(0, prompt) + OUTPUT_WEIGHT * NOMINAL.token_s * expected,
                self._places.permitted(principal, asked.model, engines, now),
            )
            tries = Tries(self._shared, caller, wanted, engines)
            try:
                await tries.run()
            finally:
                spoken, prompt, whole = tries.spoken(prompt)
        finally:
            admitted.end(spoken, whole, loop.time(), prompt)
