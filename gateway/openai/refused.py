"""Fields that would change the answer and are not supported: refused by name unless they hold their neutral value.

Everything else that a client may send and this gateway does not know is ignored, as the real API does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.errors import bad_field

_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "best_of": lambda v: v == 1,
    "suffix": lambda v: v == "",
    "length_penalty": lambda v: v == 1,
    "min_tokens": lambda v: v == 0,
    "tools": lambda v: v == [],
    "tool_choice": lambda v: v in ("none", "auto"),
    "functions": lambda v: v == [],
    "function_call": lambda v: v in ("none", "auto"),
    "response_format": lambda v: v == {"type": "text"},
    "bad_words": lambda v: v == [],
    "logits_processors": lambda v: v == [],
    "chat_template_kwargs": lambda v: v == {},
    "documents": lambda v: v == [],
    "modalities": lambda v: v == ["text"],
    "add_special_tokens": lambda v: v is True,
    "skip_special_tokens": lambda v: v is True,
    "add_generation_prompt": lambda v: v is True,
}
_BOOLEANS = frozenset({"add_special_tokens", "skip_special_tokens", "add_generation_prompt"})
_FALSE = ("echo", "use_beam_search", "continue_final_message")
_ABSENT = (
    "audio",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "prompt_logprobs",
    "prompt_embeds",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "chat_template",
)


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise a 400 naming the first unsupported field that is set. ``null`` always means unset."""
    for name, value in body.items():
        if value is None:
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is not None:
            fine = neutral(value) and (isinstance(value, bool) == (name in _BOOLEANS))
        else:
            fine = name not in _ABSENT and (name not in _FALSE or value is False)
        if not fine:
            raise bad_field(name, f"{name} is not supported here; leave it out", code="unsupported_parameter")
