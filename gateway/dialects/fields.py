"""Fields of requests and answers that several dialects look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.protocol import Body, Handoff

RANK = b"x-data-parallel-rank"
RESERVED = (
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
)
"""Where engines find each other's KV. The gateway says that: from a client it could name any address, any KV."""


def cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """Prompt tokens that an engine says it had not to compute; None where it does not say."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if type(value) is int and value >= 0 else None


def finish_reasons(answer: Mapping[str, Any]) -> list[Any]:
    """Of all choices of an answer."""
    choices = answer.get("choices")
    return [choice.get("finish_reason") for choice in choices or () if isinstance(choice, dict)]


def join_usage(payload: dict[str, Any], handoff: Handoff) -> None:
    """A decode engine may count what came from the prefill engine as cached; only what that one had cached was.

    Where that is not known no figure is better than a wrong one.
    """
    usage = payload.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if not isinstance(usage, dict) or not isinstance(details, dict) or "cached_tokens" not in details:
        return
    if handoff.cached_tokens is None:
        usage["prompt_tokens_details"] = {name: value for name, value in details.items() if name != "cached_tokens"}
    else:
        prompt = usage.get("prompt_tokens")
        cached = handoff.cached_tokens
        usage["prompt_tokens_details"] = details | {"cached_tokens": min(cached, prompt) if prompt else cached}


def wants_prompt_logprobs(body: Body) -> bool:
    """Whether log-probabilities of the prompt's own tokens are asked for."""
    echoed = bool(body.get("echo")) and body.get("logprobs") not in (None, False)
    return echoed or body.get("prompt_logprobs") is not None
