"""Spans of the gateway: each attempt and why it ended, requests that never end well, and a collector that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvcache import otlp
from kvcache.control import GenerateJob, PrefillJob
from kvcache.wire import Role
from tests.collector import Collector, SeenSpan, collecting
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import failing, never


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


async def spans_of(one: Stage, collector: Collector, trace: str) -> list[SeenSpan]:
    """All of a trace, once its root has arrived."""
    await one.until(lambda: any(span.name.startswith("POST") for span in collector.trace(trace)), 10)
    return collector.trace(trace)


async def test_each_attempt_is_a_span_and_its_nodes_are_told_it(stage: Open, collector: Collector) -> None:
    one = await stage(otlp_endpoint=collector.url)
    remote, decode = await one.pair("east", on_prefill=failing("prefill", "engine_lost"))
    local = await one.node("p-local", Role.PREFILL)
    trace = "1" * 32
    answer = await one.complete(words=60, headers={"traceparent": f"00-{trace}-{'2' * 16}-01"})
    assert (answer.status_code, answer.headers["x-prfaas-route"]) == (200, "local")
    spans = await spans_of(one, collector, trace)
    first, second = (span for span in spans if span.name == "attempt")
    assert (first.failed, first.attributes["prfaas.outcome"], first.attributes["prfaas.cluster"]) == (
        True,
        "failed",
        "east",
    )
    assert (second.failed, second.attributes["prfaas.outcome"]) == (False, "finished")
    told = [job.traceparent for node in (remote, local) for job in node.jobs(PrefillJob)]
    assert told == [f"00-{trace}-{span.span}-01" for span in (first, second)]
    assert [job.traceparent for job in decode.jobs(GenerateJob)] == told
    root = next(span for span in spans if span.name.startswith("POST"))
    assert (root.parent, root.attributes["prfaas.route"], root.failed) == ("2" * 16, "local", False)


async def test_refused_and_abandoned_requests_end_their_spans(stage: Open, collector: Collector) -> None:
    one = await stage(otlp_endpoint=collector.url)
    await one.node("d", Role.DECODE, on_generate=never)
    refused, left = "3" * 32, "4" * 32
    assert (await one.complete(n=99, headers={"traceparent": f"00-{refused}-{'2' * 16}-01"})).status_code == 400
    by_name = {span.name: span for span in await spans_of(one, collector, refused)}
    assert by_name["parse"].failed
    assert by_name["POST /v1/completions"].attributes["http.response.status_code"] == 400
    asking = asyncio.create_task(one.complete(headers={"traceparent": f"00-{left}-{'2' * 16}-01"}))
    await one.until(lambda: one.gateway.registry.nodes()[0].jobs)
    asking.cancel()
    by_name = {span.name: span for span in await spans_of(one, collector, left)}
    assert by_name["attempt"].attributes["prfaas.outcome"] == "disconnected"
    assert by_name["POST /v1/completions"].attributes["http.response.status_code"] == 499


async def test_a_collector_that_is_away_harms_no_request(stage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "CLOSE_S", 0.1)
    one = await stage(otlp_endpoint="http://127.0.0.1:9")
    _, decode = await one.pair()
    answers = await asyncio.gather(*(one.complete() for _ in range(20)))
    assert [answer.status_code for answer in answers] == [200] * 20
    assert all(job.traceparent for job in decode.jobs(GenerateJob)), "traced in vain"
