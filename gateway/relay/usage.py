"""How many tokens an answer was, read from its last bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIELD = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)"\s*:\s*(\d{1,12})')
_MOST = 4096


@dataclass(frozen=True, slots=True)
class Usage:
    """As the engine counted."""

    prompt: int
    completion: int
    cached: int


def usage_in(tail: bytes) -> Usage | None:
    """The last usage object in the last bytes of an answer, None where there is none.

    In text that a model wrote the quotes of such an object would be escaped, so it cannot look like one.
    """
    at = tail.rfind(b'"usage"')
    if at < 0:
        return None
    found = {name: int(number) for name, number in _FIELD.findall(tail, at, at + _MOST)}
    if b"prompt_tokens" not in found:
        return None
    return Usage(found[b"prompt_tokens"], found.get(b"completion_tokens", 0), found.get(b"cached_tokens", 0))
