"""``POST /v1/plans/what-if``: what would be if the fleet or the traffic were different.

The answer comes as one JSON object; to whoever accepts ``application/x-ndjson`` as lines, with its progress before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from gateway.answers import json_answer, needs
from gateway.errors import ApiError
from gateway.keys import Role
from gateway.rebalance_routes import BodyOf
from gateway.registry import Registry
from gateway.report.gathering import ReportSource
from gateway.what_if import WhatIf, refused
from gateway.what_if_worker import Task
from scheduler.report.latency import Goals
from scheduler.report.requests import Window
from scheduler.values import PolicyValues
from scheduler.what_if import basis as bases
from scheduler.what_if.basis import Basis, NoBasis
from scheduler.what_if.question import Question

LINES = "application/x-ndjson"
CHUNK_TOKENS = 256
"""While no node has joined: the default of our own nodes."""


def add_what_if_routes(
    api: FastAPI, source: ReportSource, registry: Registry, values: PolicyValues, body_of: BodyOf
) -> None:
    """Add the route. ``values`` are the routing policy's, so that the simulation decides as the gateway does."""
    what_if = WhatIf()

    async def basis_of(question: Question) -> Basis:
        if question.preset is not None:
            return bases.case_study()
        given = source.inputs(None, Goals())
        requests, _ = await asyncio.to_thread(source.requests, None, given.until)
        since = min((one.at for one in requests), default=given.until)
        try:
            return bases.observed(
                given.seen,
                requests,
                Window(since, given.until, len(requests)),
                registry.local_cluster,
                registry.chunk_tokens or CHUNK_TOKENS,
                {site.name: site.prices for site in given.sites},
            )
        except NoBasis as error:
            raise ApiError(503, str(error), code="not_yet_known", retry_after_s=30) from error

    @api.post("/v1/plans/what-if", dependencies=[needs(Role.PLANNER)])
    async def ask(request: Request) -> Response:
        try:
            question: Question = await body_of(request, Question)
        except ApiError as error:
            # a value that only the question itself can judge has no path, but a sentence that names the field
            raise error if error.param or error.status != 400 else refused(error.message) from error
        lines = what_if.lines(Task(await basis_of(question), question, values))
        if LINES in request.headers.get("accept", ""):
            # the first line decides on the status; what goes wrong later is a line
            first = await anext(lines)
            return StreamingResponse(_told(first, lines), media_type=LINES)
        return json_answer(await _answer(request, lines))


async def _told(first: dict[str, Any], lines: AsyncGenerator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async with aclosing(lines):
        yield msgspec.json.encode(first) + b"\n"
        try:
            async for said in lines:
                yield msgspec.json.encode(said) + b"\n"
        except ApiError as error:
            yield msgspec.json.encode(error.body()) + b"\n"


async def _answer(request: Request, lines: AsyncGenerator[dict[str, Any]]) -> dict[str, Any]:
    """The answer alone; nothing, and no more work for it, once the client has left."""
    answering, leaving = asyncio.create_task(_last(lines)), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else {}
    finally:
        for each in (answering, leaving):
            each.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _last(lines: AsyncGenerator[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    async with aclosing(lines):
        async for said in lines:
            answer = said.get("answer", answer)
    return answer


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
