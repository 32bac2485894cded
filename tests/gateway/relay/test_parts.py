"""What is read of a body and of an answer's end, which headers pass, and which engine is next."""

from __future__ import annotations

import json

import pytest

from gateway.fleet.config import EngineConfig
from gateway.fleet.engine import Engine
from gateway.relay import headers
from gateway.relay.asked import parse, with_usage
from gateway.relay.engines import Heads, pick
from gateway.relay.usage import Usage, usage_in


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"model": 1}', b'{"model": "\xff"}', b'{"model": "m", "x": ' + b"[" * 100_000, b'{"prompt": "a"}'],
)
def test_what_names_no_model_is_no_request_to_one(body: bytes) -> None:
    assert parse(body) is None


@pytest.mark.parametrize(
    ("fields", "bound", "tells", "forbidden"),
    [
        ({}, None, True, None),
        ({"max_tokens": 5, "n": 3, "stream": True}, 15, False, None),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7, True, None),
        ({"max_tokens": -5, "n": "x", "stream": "yes"}, None, True, None),
        ({"stream": True, "stream_options": {"include_usage": True}}, None, True, None),
        ({"stream": True, "stream_options": {"include_usage": False}}, None, False, None),
        ({"bootstrap_host": "10.0.0.1"}, None, True, "bootstrap_host"),
    ],
)
def test_fields_that_matter_here(fields: dict[str, object], bound: int | None, tells: bool, forbidden: str) -> None:
    asked = parse(json.dumps({"model": "m"} | fields).encode())
    assert asked is not None
    assert (asked.bound, asked.tells_usage, asked.forbidden) == (bound, tells, forbidden)


def test_asking_for_usage_changes_nothing_else() -> None:
    body = b'{"model": "m", "big": 12345678901234567890.5, "stream_options": {"x": 1, "include_usage": false}}'
    changed = with_usage(body)
    assert b"12345678901234567890.5" in changed
    assert json.loads(changed)["stream_options"] == {"x": 1, "include_usage": True}
    assert json.loads(with_usage(b'{"stream_options": null}')) == {"stream_options": {"include_usage": True}}


def test_usage_is_the_engines_and_not_what_a_model_wrote() -> None:
    said = {"usage": {"prompt_tokens": 99, "completion_tokens": 99}}
    answer = {"choices": [{"text": json.dumps(said)}]}
    assert usage_in(json.dumps(answer).encode()) is None
    told = {
        "prompt_tokens": 5,
        "total_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert usage_in(json.dumps(answer | {"usage": told}).encode()) == Usage(5, 2, 3)
    assert usage_in(b'"usage": null') is None


def test_what_belongs_to_a_connection_or_to_one_side_does_not_pass() -> None:
    given = [(b"connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"te", b"trailers"), (b"upgrade", b"h2c")]
    own = [
        (b"authorization", b"a"),
        (b"cookie", b"b"),
        (b"x-prfaas-route-hint", b"local"),
        (b"expect", b"100-continue"),
    ]
    assert headers.to_engine([*given, *own, (b"accept", b"*/*")]) == [(b"accept", b"*/*")]
    theirs = [(b"set-cookie", b"a"), (b"access-control-allow-origin", b"*"), (b"x-prfaas-route", b"forged")]
    assert headers.to_client([*given, *theirs, (b"x-engine", b"1")]) == [(b"x-engine", b"1")]


def engine(name: str, **fields: int) -> Engine:
    one = Engine(EngineConfig("http://127.0.0.1:1", name, "m", **fields))  # type: ignore[arg-type]
    one.trouble = None
    return one


def test_the_emptiest_for_its_size_is_next_and_one_that_failed_last() -> None:
    small, large, unwell = engine("small", max_running=2), engine("large", max_running=10), engine("unwell")
    unwell.trouble = "gone"
    all_of_them = [small, large, unwell]
    small.running, large.running = 1, 4
    assert pick(all_of_them, lambda _: True, (), 0.0) is large
    assert pick(all_of_them, lambda _: True, {"large"}, 0.0) is small
    assert pick(all_of_them, lambda one: one is not small, {"large"}, 0.0) is large
    small.running, large.running = 2, 10
    assert pick(all_of_them, lambda _: True, (), 0.0) is None


def test_a_head_has_the_engines_key_and_as_many_bytes_as_the_body() -> None:
    config = EngineConfig("http://127.0.0.1:7000", "e", "m", key="secret")
    origin, head = Heads().head(config, "/v1/completions", b"x-a: 1\r\n", 12)
    assert (origin.host, origin.port) == ("127.0.0.1", 7000)
    assert head == (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:7000\r\nauthorization: Bearer secret\r\nx-a: 1\r\n"
        b"content-length: 12\r\n\r\n"
    )
