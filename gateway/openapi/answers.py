"""Schemas of answers that are built as they are written, and not from types."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
GENERATION_HEADERS = (
    "x-request-id",
    "x-prfaas-route",
    "x-prfaas-route-reason",
    "x-prfaas-prefill",
    "x-prfaas-kv-codec",
)
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def having(*fields: str) -> Schema:
    """An object that has these fields, and others."""
    return {"type": "object", "required": list(fields)} if fields else {"type": "object"}


_USAGE: Schema = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
}
_TEXT: Schema = {"type": "string"}


def _generation(kind: str, said: Schema) -> Schema:
    choice = {
        "type": "object",
        "required": ["index", "finish_reason", "logprobs", *said],
        "properties": {
            "index": {"type": "integer"},
            "finish_reason": {"enum": ["stop", "length"]},
            "stop_reason": {"type": ["string", "null"]},
            "logprobs": {"type": ["object", "null"]},
            **said,
        },
    }
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": _TEXT,
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": {"type": "array", "minItems": 1, "items": choice},
            "usage": _USAGE,
        },
    }


COMPLETION = _generation("text_completion", {"text": _TEXT})
_MESSAGE: Schema = {"type": "object", "required": ["role", "content"], "properties": {"content": _TEXT}}
CHAT = _generation("chat.completion", {"message": _MESSAGE})
