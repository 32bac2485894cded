"""Events, parts of requests and how they become one answer again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gateway.dialects.leg import LegFailed, error_status
from gateway.dialects.legs import NOTHING
from gateway.dialects.parts import Part, count, joined, parts
from gateway.dialects.protocol import Handoff
from gateway.dialects.sse import MAX_EVENT_BYTES, Cutter, EventTooLarge, payload_of
from gateway.dialects.stream_join import StreamJoin


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_whole_whatever_pieces_they_came_in(size: int, end: bytes) -> None:
    stream = b'data: {"a":1}' + end * 2 + b": comment" + end * 2 + b"data: [DONE]" + end * 2
    cutter = Cutter()
    found = [event for at in range(0, len(stream), size) for event in cutter.feed(stream[at : at + size])]
    assert found == [b'data: {"a":1}\n\n', b": comment\n\n", b"data: [DONE]\n\n"]
    assert [payload_of(event) for event in found] == [{"a": 1}, None, None]
    assert not cutter.rest.strip()


def test_an_event_without_end_is_refused() -> None:
    cutter = Cutter()
    assert cutter.feed(b"x" * MAX_EVENT_BYTES) == []
    with pytest.raises(EventTooLarge):
        cutter.feed(b"x")


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        ({"choices": []}, None),
        ({"error": {"message": "m", "code": 429}}, 429),
        ({"error": {"message": "m", "code": "x"}}, 500),
        ({"object": "error", "message": "m", "code": 400}, 400),
    ],
)
def test_an_error_in_the_place_of_an_answer_is_seen(payload: dict[str, Any], status: int | None) -> None:
    assert error_status(payload) == status


def test_prompts_and_samples_are_parts_that_number_their_choices_as_one_engine_does() -> None:
    body = {"prompt": ["a", "b"], "n": 2, "seed": 10, "best_of": 2}
    one_by_one = parts(body, batches=False)
    assert [(part.body["prompt"], part.body["seed"], part.offset) for part in one_by_one] == [
        ("a", 10, 0),
        ("a", 11, 1),
        ("b", 10, 2),
        ("b", 11, 3),
    ]
    assert [part.counts_prompt for part in one_by_one] == [True, False, True, False]
    assert not any("n" in part.body or "best_of" in part.body for part in one_by_one)
    batches = parts(body, batches=True)
    assert [(part.body["prompt"], part.offset, part.stride) for part in batches] == [
        (["a", "b"], 0, 2),
        (["a", "b"], 1, 2),
    ]
    assert (count(body, False), count(body, True)) == (4, 2)
    assert parts({"prompt": [1, 2, 3]}, False) == (Part({"prompt": [1, 2, 3]}),)
    assert parts({"messages": [], "n": 1}, False) == (Part({"messages": [], "n": 1}),)


def test_usage_of_parts_counts_each_prompt_once_and_all_that_was_spoken() -> None:
    of = parts({"prompt": "a", "n": 2}, batches=False)
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    answers = [{"id": str(at), "choices": [{"index": 0, "text": str(at)}], "usage": usage} for at in range(2)]
    assert joined(answers, of) == {
        "id": "0",
        "choices": [{"index": 0, "text": "0"}, {"index": 1, "text": "1"}],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 6,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


class Said:
    """Legs that have begun and say this."""

    prefilled_at: float | None = None

    def __init__(self, *payloads: dict[str, Any], done: bool = True) -> None:
        self._events = [b"data: " + msgspec.json.encode(payload) + b"\n\n" for payload in payloads]
        self._events += [b"data: [DONE]\n\n"] if done else []

    async def begin(self) -> None:
        pass

    async def events(self) -> AsyncIterator[bytes]:
        for event in self._events:
            yield event

    async def whole(self) -> dict[str, Any]:
        return {}

    async def handed_off(self) -> Handoff:
        return NOTHING

    def close(self) -> None:
        pass


def piece(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": None}]} | more


USAGE = {"id": "x", "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}


async def told(body: dict[str, Any], *legs: Said, of: tuple[Part, ...] = (Part({}),)) -> list[Any]:
    join = StreamJoin(body, legs, of, None)
    return [chunk async for chunk in join.chunks()]


async def test_usage_that_only_the_gateway_wanted_is_not_passed_on() -> None:
    asked = await told({"stream_options": {"include_usage": True}}, Said(piece("a"), USAGE))
    unasked = await told({}, Said(piece("a"), USAGE))
    assert [payload_of(event) for event in asked] == [piece("a"), USAGE, None]
    assert [payload_of(event) for event in unasked] == [piece("a"), None]


async def test_a_stream_without_its_last_event_is_cut_off() -> None:
    with pytest.raises(LegFailed, match="cut_off"):
        await told({}, Said(piece("a"), done=False))
    of = parts({"prompt": "a", "n": 2}, batches=False)
    with pytest.raises(LegFailed, match="cut_off"):
        await told({}, Said(piece("a")), Said(piece("b"), done=False), of=of)


async def test_an_error_event_ends_the_stream_as_a_failure() -> None:
    with pytest.raises(LegFailed, match="error_in_stream"):
        await told({}, Said(piece("a"), {"error": {"message": "m", "code": 500}}))


async def test_parts_of_a_stream_have_one_name_and_numbers_of_their_own() -> None:
    of = parts({"prompt": "a", "n": 2}, batches=False)
    events = await told({}, Said(piece("a")), Said(piece("b") | {"id": "y"}), of=of)
    payloads = [payload for event in events if (payload := payload_of(event)) is not None]
    assert sorted((one["choices"][0]["index"], one["choices"][0]["text"]) for one in payloads) == [(0, "a"), (1, "b")]
    assert len({one["id"] for one in payloads}) == 1
    assert events[-1] == b"data: [DONE]\n\n"
