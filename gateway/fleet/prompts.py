"""How long a prompt is that external engines will render themselves: its ids decide routing, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.errors import ApiError
from gateway.openai.requests import chat_messages
from gateway.tokenizing import Tokenizing

CHARS_PER_TOKEN = 4
"""Where the gateway cannot render a prompt as the engine will: tools, pictures, a batch."""
MOST_CHARS = 8 << 20


async def token_ids(body: Mapping[str, Any], tokenizing: Tokenizing) -> tuple[int, ...] | None:
    """The ids of the one prompt of a request, None where they cannot be known here. Raises ApiError 503."""
    try:
        if body.get("messages") is not None:
            return await _chat(body, tokenizing)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return tuple(await tokenizing.encode(prompt, body.get("add_special_tokens") is not False))
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return tuple(prompt)
    except ApiError as error:
        if error.status >= 500:
            raise
    return None


async def _chat(body: Mapping[str, Any], tokenizing: Tokenizing) -> tuple[int, ...] | None:
    if body.get("tools") or body.get("chat_template_kwargs") or body.get("chat_template"):
        return None
    messages = body["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    return tuple(await tokenizing.encode_chat(chat_messages(messages)))


def about(body: Mapping[str, Any]) -> int:
    """About how many tokens all prompts of a request have."""
    return max(1, _chars(body.get("messages") or body.get("prompt")) // CHARS_PER_TOKEN)


def _chars(value: Any) -> int:
    """Characters of all texts in a value; a token id counts as one token."""
    total, left = 0, [value]
    while left and total < MOST_CHARS:
        one = left.pop()
        if isinstance(one, str):
            total += len(one)
        elif type(one) is int:
            total += CHARS_PER_TOKEN
        elif isinstance(one, dict):
            left += [part for name, part in one.items() if name in ("content", "text", "function", "arguments")]
        elif isinstance(one, list):
            left += one
    return total
