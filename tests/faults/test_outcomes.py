"""What the fault matrix calls an answer, a clear error, and a failure; and what it calls a leak."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.matrix.leaks import Held, held_by
from tests.faults.matrix.outcome import Kind, of_response, of_stream


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("status", "sent", "kind"),
    [
        (200, body(usage={"completion_tokens": 3}), Kind.ANSWER),
        (200, body(usage={"completion_tokens": 2}), Kind.UNCLEAR),
        (200, body(), Kind.UNCLEAR),
        (503, body(error={"code": "overloaded"}), Kind.ERROR),
        (503, body(error={"code": None}), Kind.UNCLEAR),
        (500, b"Internal Server Error", Kind.UNCLEAR),
    ],
)
def test_a_response_is_an_answer_of_the_right_length_or_an_error_with_a_code(
    status: int, sent: bytes, kind: Kind
) -> None:
    assert of_response(status, sent, 3).kind is kind


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([event(choices=[{}]), "", event(choices=[], usage={"completion_tokens": 3}), "data: [DONE]"], Kind.ANSWER),
        ([event(choices=[{}]), event(choices=[], usage={"completion_tokens": 3})], Kind.UNCLEAR),
        ([event(choices=[{}]), "data: [DONE]"], Kind.UNCLEAR),
        ([event(choices=[{}]), event(error={"code": "node_lost"})], Kind.ERROR),
        ([], Kind.UNCLEAR),
    ],
)
def test_a_stream_ends_with_its_end_or_with_an_error_event(lines: list[str], kind: Kind) -> None:
    assert of_stream(lines, 3).kind is kind


def status(**said: Any) -> dict[str, Any]:
    idle: dict[str, Any] = {"pages_total": 8, "pages_free": 8, "tasks": 10, "files": 20, "links": [{"connections": 4}]}
    idle |= dict.fromkeys(("queued_jobs", "queued_tokens", "running", "open_transfers"), 0)
    return {
        "queue": {"waiting": 0},
        "clusters": [{"name": "east", "link": {"queued_bytes": 0}}],
        "nodes": [{"node_id": "p", "jobs": 0, "heartbeat": idle | said}],
    }


GATEWAY = {"requests": 0.0, "tasks": 30.0, "files": 40.0}


@pytest.mark.parametrize(
    ("said", "leak"),
    [
        ({}, None),
        ({"pages_free": 7}, "p.blocks"),
        ({"open_transfers": 1}, "p.open_transfers"),
        ({"queued_tokens": 5}, "p.queued_tokens"),
        ({"tasks": 12}, None),
        ({"tasks": 13}, "p.tasks"),
        ({"files": 25}, "p.files"),
        ({"files": 25, "links": [{"connections": 8}]}, None),
    ],
)
def test_what_is_held_when_idle_or_has_grown_is_a_leak(said: dict[str, Any], leak: str | None) -> None:
    before = held_by(status(), GATEWAY)
    assert list(held_by(status(**said), GATEWAY).leaks(before)) == ([] if leak is None else [leak])


def test_a_node_that_is_gone_and_a_request_that_never_ends_are_leaks() -> None:
    before = held_by(status(), GATEWAY)
    gone = held_by(status() | {"nodes": []}, GATEWAY | {"requests": 1.0})
    assert gone.leaks(before) == {"gateway.requests": "1 held", "p.tasks": "is gone", "p.files": "is gone"}
    assert Held().leaks(Held()) == {}
