"""The edges of JSON and of SSE: whatever a body holds, it is answered or refused with a stated status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.model import ServedModel
from gateway.openai.requests import ChatBody, CompletionBody, parse_chat, parse_completion
from gateway.openai.responses import Answer
from gateway.openapi.operations import GENERATION, ROUTES
from gateway.state import State
from gateway.text_routes import DetokenizeBody, TokenizeBody
from kvcache.control import AnswerEnded, Delta, Finished
from tests.calm import calm
from tests.gateway.direct import DirectTransport

BODIES = {
    "/v1/completions": (CompletionBody, {"model": '"tiny"', "prompt": '"ab"'}),
    "/v1/chat/completions": (ChatBody, {"model": '"tiny"', "messages": '[{"role":"user","content":"ab"}]'}),
    "/tokenize": (TokenizeBody, {"prompt": '"ab"'}),
    "/detokenize": (DetokenizeBody, {"tokens": "[5, 6]"}),
}
EDGES = [
    b"[" * 3000,
    b"[" * 900 + b"]" * 900,
    b'{"a":' * 900 + b"1" + b"}" * 900,
    b"1e999",
    b"-1e999",
    b"1e-999",
    b"NaN",
    b"-Infinity",
    b"9" * 400,
    b"-" + b"9" * 400,
    b"1." + b"3" * 400,
    b"9007199254740993",
    b"18446744073709551616",
    b"-0",
    b"-0.0",
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"\\ud83d\\ude00"',
    b'"\\u0000"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"\xf0\x9f\x98"',
    b'"\n"',
    b'{"a":1,"a":2}',
    b'{"":null}',
    b'["\\ud800"]',
    b'{"5":1e308}',
    b'{"\\ud800":1}',
    b'[{"role":"user","content":"\\ud800"}]',
    b'[{"role":"user","content":[{"type":"text","text":"\\udc00 x"}]}]',
    b"true",
    b"null",
    b'""',
    b"[]",
    b"{}",
    b"[null]",
    b"[1e30]",
    b'"' + b"a" * 5000 + b'"',
]


@pytest.fixture(scope="module")
def asked(model_dir: Any, model: ServedModel) -> Iterator[Any]:
    """What a gateway without nodes answers to a body."""
    loop = asyncio.new_event_loop()
    gateway = Gateway(GatewayConfig(model_dir, "tiny", max_body_bytes=100_000), model, State(None))
    transport = DirectTransport(gateway)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def ask(path: str, body: bytes) -> httpx.Response:
        return loop.run_until_complete(client.post(path, content=body))

    yield ask
    loop.run_until_complete(client.aclose())
    gateway.close()
    loop.close()


def body_of(path: str, edges: dict[str, bytes]) -> bytes:
    """A whole body with these values, raw, in the place of what it had."""
    fields = {name: text.encode() for name, text in BODIES[path][1].items()} | edges
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields.items()) + b"}"


def check(path: str, answer: httpx.Response) -> None:
    operation = GENERATION.get(("POST", path)) or ROUTES["POST", path]
    stated = {operation.status, 400, 413, 415, *operation.errors}
    assert answer.status_code in stated, answer.text
    found = answer.json()
    if answer.status_code != 200:
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 4000, "an error does not repeat what was sent"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: repr(edge[:16]))
def test_an_edge_in_any_field_is_answered_or_refused(asked: Any, path: str, edge: bytes) -> None:
    kind = BODIES[path][0]
    shared = () if kind is CompletionBody else CompletionBody.__struct_fields__  # which are read by the same code
    for field in sorted({*kind.__struct_fields__, *BODIES[path][1], "user"} - {*shared} | {*BODIES[path][1]}):
        check(path, asked(path, body_of(path, {field: edge})))


@settings(calm, max_examples=40)
@given(st.data())
def test_several_edges_at_once_are_answered_or_refused(asked: Any, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(BODIES)))
    fields = st.sampled_from(sorted(BODIES[path][0].__struct_fields__))
    check(path, asked(path, body_of(path, data.draw(st.dictionaries(fields, st.sampled_from(EDGES), max_size=4)))))


@calm
@given(st.binary(max_size=200), st.sampled_from(sorted(BODIES)), st.integers(0, 60))
def test_any_bytes_anywhere_in_a_body_are_answered_or_refused(asked: Any, data: bytes, path: str, at: int) -> None:
    whole = body_of(path, {})
    check(path, asked(path, whole[:at] + data + whole[at:]))


def test_of_a_field_that_comes_twice_the_last_counts_and_is_checked() -> None:
    body = b'{"model":"x","prompt":"a","model":"tiny","prompt":"b","n":2,"n":3}'
    request = parse_completion(body)
    assert (request.model, request.text, request.n) == ("tiny", "b", 3)


@settings(calm, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=6)), max_size=12), st.booleans())
def test_a_stream_of_any_text_is_whole_events_of_one_line_each(
    model: ServedModel, said: list[tuple[int, str]], chat: bool
) -> None:
    if chat:
        request = parse_chat(b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"n":3,"stream":true}')
    else:
        request = parse_completion(b'{"model":"tiny","prompt":"x","n":3,"stream":true}')
    answer = Answer(request, "id", 0, "fp", (1, 2), model.token_text)
    stream = b"".join(answer.chunk(Delta("g", text, (300,), None, index)) for index, text in said)
    stream += b"".join(answer.chunk(AnswerEnded("g", index, "stop")) for index in range(3))
    stream += answer.end(Finished("g", "stop", 2, len(said), 0))
    *events, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    heard = dict.fromkeys(range(3), "")
    for event in events:
        assert event.startswith("data: {")
        assert "\n" not in event
        assert "\r" not in event
        for choice in json.loads(event[6:])["choices"]:
            heard[choice["index"]] += choice["delta"].get("content", "") if chat else choice["text"]
    assert heard == {index: "".join(text for at, text in said if at == index) for index in range(3)}
