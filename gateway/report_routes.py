"""Planner routes: the rebalancing report, and what would be if the fleet or the traffic were different."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import msgspec
from fastapi import FastAPI, Query, Response

from gateway.answers import needs
from gateway.errors import bad_field
from gateway.keys import Role
from gateway.report.csv_text import csv_text
from gateway.report.gathering import ReportSource
from gateway.report.page import POLICY, page
from scheduler.report.latency import Goals
from scheduler.report.report import Report, make_report

_GUARDS = {
    "content-security-policy": f"{POLICY}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Format(StrEnum):
    """In which form a report is wanted."""

    JSON = "json"
    CSV = "csv"
    HTML = "html"


def add_report_routes(api: FastAPI, source: ReportSource, model: str) -> None:
    """Add the route of the report; ``model`` is the served model's name."""
    one_at_a_time = asyncio.Lock()

    @api.get("/v1/reports/rebalancing", dependencies=[needs(Role.PLANNER)])
    async def rebalancing(
        format: Format = Format.JSON,
        since: Annotated[float | None, Query(ge=0, le=1e11)] = None,
        tpot_goal_ms: float | None = None,
        ttft_floor_s: float = 2.0,
        ttft_factor: float = 3.0,
    ) -> Response:
        try:
            goals = Goals(ttft_floor_s, ttft_factor, None if tpot_goal_ms is None else tpot_goal_ms / 1000)
        except ValueError as error:
            name = str(error).split()[0]
            raise bad_field("tpot_goal_ms" if name == "tpot_s" else name, str(error)) from error
        async with one_at_a_time:
            inputs = source.inputs(since, goals)

            def work() -> bytes:
                requests, truncated = source.requests(since, inputs.until)
                report = make_report(replace(inputs, requests=requests, truncated=truncated))
                return _written(report, format, model)

            body = await asyncio.to_thread(work)
        return Response(body, headers=_GUARDS, media_type=_MEDIA[format])


_MEDIA = {
    Format.JSON: "application/json",
    Format.CSV: "text/csv; charset=utf-8",
    Format.HTML: "text/html; charset=utf-8",
}


def _written(report: Report, format: Format, model: str) -> bytes:
    match format:
        case Format.JSON:
            return msgspec.json.encode(report)
        case Format.CSV:
            return csv_text(report).encode()
        case Format.HTML:
            return page(report, model).encode()
