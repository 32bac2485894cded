"""Events of streamed answers: what is made from parts that were made before is what would be made anew."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.model import ServedModel
from gateway.openai.requests import parse_chat, parse_completion
from gateway.openai.responses import Answer
from kvcache.control import Delta

TEXTS = ["text", '"', "\\", '{"text":"text"}', "\u2028\n\0", "\U0001f600", "x" * 5000]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("usage", [False, True])
def test_events_of_text_differ_in_their_text_alone(model: ServedModel, chat: bool, usage: bool) -> None:
    body: dict[str, Any] = {"model": 'a "text" model', "stream": True, "n": 2}
    body |= {"stream_options": {"include_usage": usage}}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    request = (parse_chat if chat else parse_completion)(json.dumps(body).encode())

    def answer() -> Answer:
        return Answer(request, "id", 7, "fp", (1, 2), model.token_text)

    one = answer()
    for choice in (0, 1):
        one.chunk(Delta("g", "first", (5,), None, choice))
    for text in TEXTS:
        for choice in (0, 1):
            anew = answer()
            opening = anew.chunk(Delta("g", "", (5,), None, choice))
            whole = anew.chunk(Delta("g", text, (5,), None, choice))
            first = answer().chunk(Delta("g", text, (5,), None, choice))
            assert one.chunk(Delta("g", text, (5,), None, choice)) == whole == first.removeprefix(opening)
