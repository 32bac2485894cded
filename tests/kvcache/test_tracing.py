"""Traces: contexts are checked, spans arrive at a real collector as one tree, and one that is away harms nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvcache import otlp
from kvcache.tracer import tracer_for
from kvcache.tracing import NO_SPAN, NO_TRACER, part, valid_traceparent
from tests.collector import Collector, collecting

CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        CALLER.upper(),
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"{CALLER}-more",
        f"{CALLER}\n",
        f"01-{'a' * 32}-{'b' * 16}-01-{'x' * 300}",
        f"00-{'a' * 32}-{'b' * 16}-0\u0661",
    ],
)
def test_what_is_no_context_is_taken_for_none(text: str) -> None:
    assert not valid_traceparent(text)


def test_a_context_of_this_and_of_a_later_version_is_taken() -> None:
    assert valid_traceparent(CALLER)
    assert valid_traceparent(f"01-{'a' * 32}-{'b' * 16}-01-later")


def test_spans_of_two_processes_become_one_tree(collector: Collector) -> None:
    gateway = tracer_for(collector.url, "gate", "g")
    node = tracer_for(collector.url + "/", "node", "n")
    root = gateway.serve("request", CALLER)
    with pytest.raises(ValueError, match="scripted"), part(root, "inner"):
        raise ValueError("scripted: this text is nobody's business")
    work = node.join("work", root.traceparent)
    work.note({"count": 3, "word": "w" * 1000})
    work.happened("first")
    work.end("stage: cause")
    work.end()
    root.end()
    gateway.close()
    node.close()
    found = {span.name: span for span in collector.trace("a" * 32)}
    assert found["request"].parent == "b" * 16
    assert found["inner"].parent == found["work"].parent == found["request"].span
    assert (found["inner"].failed, found["work"].failed, found["request"].failed) == (True, True, False)
    assert found["work"].attributes == {"count": 3, "word": "w" * 256}
    assert (found["work"].service, found["work"].events) == ("node", ("first",))
    assert b"nobody's business" not in collector.raw
    assert not collector.faults


def test_a_caller_that_does_not_sample_and_an_order_without_a_context_are_not_traced(collector: Collector) -> None:
    tracer = tracer_for(collector.url, "gate", "g")
    assert tracer.serve("request", CALLER[:-2] + "00") is NO_SPAN
    assert tracer.join("work", "") is NO_SPAN
    assert tracer.serve("request", "nonsense").traceparent[3:35] not in ("", "a" * 32)
    tracer.close()


@pytest.mark.parametrize("status", [500, 400, None])
def test_a_collector_that_takes_nothing_holds_nobody_up(
    collector: Collector, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "CLOSE_S", 0.3)
    url = "http://127.0.0.1:9" if status is None else collector.url
    collector.answer = status or 200
    tracer = tracer_for(url, "gate", "g")
    began = time.monotonic()
    for _ in range(otlp.QUEUE + 10):
        tracer.serve("request", "").end()
    tracer.close()
    collector.answer = 200
    assert time.monotonic() - began < 2


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert tracer_for(None, "gate", "g") is NO_TRACER
    assert NO_TRACER.serve("request", CALLER).child("part").traceparent == ""


@pytest.mark.parametrize("url", ["collector:4318", "ftp://x", "http://", "http://u:p@h", "http://h/?a=b"])
def test_what_is_no_base_url_is_refused_with_the_cure(url: str) -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:4318"):
        tracer_for(url, "gate", "g")
