"""How one request ended, judged by what its client saw: an answer, a clear error, or neither, which is a failure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a client can meet. All but the last three are fine."""

    ANSWER = "answer"
    ERROR = "error"
    """A status or an SSE event with an error object that has a code."""
    LEFT = "left"
    """The client itself went away, as it meant to."""
    UNREACHABLE = "unreachable"
    """No connection, or one that broke: fine only while the gateway itself is the victim."""
    UNCLEAR = "unclear"
    """A 5xx without a code, a stream that ends without its end, an answer of the wrong length."""
    HANGS = "hangs"
    """Neither an answer nor an error by the request's deadline."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``detail`` is the error's code, or what was wrong. ``route`` is the way that an answer says it took."""

    kind: Kind
    detail: str = ""
    seconds: float = 0.0
    route: str = ""


def of_response(status: int, body: bytes, tokens: int) -> Outcome:
    """A whole response to a request for so many tokens."""
    try:
        plain = json.loads(body)
    except ValueError:
        return Outcome(Kind.UNCLEAR, f"status {status} without JSON")
    if status == 200:
        return _counted(plain.get("usage"), tokens)
    return _error(plain, f"status {status}")


def of_stream(lines: Sequence[str], tokens: int) -> Outcome:
    """The data lines of a stream, which asked for its usage."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if not data:
        return Outcome(Kind.UNCLEAR, "an empty stream")
    if data[-1] != "[DONE]":
        last = json.loads(data[-1])
        return _error(last, "the stream ended") if "error" in last else Outcome(Kind.UNCLEAR, "truncated")
    usages = [event["usage"] for event in map(json.loads, data[:-1]) if event.get("usage")]
    return _counted(usages[-1] if usages else None, tokens)


def _counted(usage: dict[str, Any] | None, tokens: int) -> Outcome:
    came = None if usage is None else usage.get("completion_tokens")
    return Outcome(Kind.ANSWER) if came == tokens else Outcome(Kind.UNCLEAR, f"{came} of {tokens} tokens")


def _error(plain: dict[str, Any], what: str) -> Outcome:
    error = plain.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return Outcome(Kind.ERROR, code) if code else Outcome(Kind.UNCLEAR, f"{what} without an error code")
