"""What vLLM's dialects have in common: the bodies of both legs, what is not split, how KV nobody wants is let go.

The prefill engine computes one token that is thrown away: the decode engine samples every token of the answer itself,
the first one included, so its body is the client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.fields import RANK, wants_prompt_logprobs
from gateway.dialects.protocol import Ask, Body, Pair, Side

_NOT_FOR_PREFILL = frozenset(
    ("stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "echo", "stop", "stop_token_ids")
)
_NO_SUCH_MODEL = "prfaas-lets-go-of-kv"


def whole(body: Body) -> str | None:
    """For prompt log-probabilities the decode engine computes the whole prompt again, and a beam search forks it."""
    if wants_prompt_logprobs(body):
        return "prompt_logprobs"
    return "beam_search" if body.get("use_beam_search") else None


def prefill(pair: Pair, params: dict[str, Any]) -> Ask:
    """One token, whatever it is: one that ends the answer would end the request before its KV is handed over."""
    body = {name: value for name, value in pair.body.items() if name not in _NOT_FOR_PREFILL}
    body |= {"stream": False, "max_tokens": 1, "ignore_eos": True, "kv_transfer_params": params}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return Ask(pair.path, body, _rank(pair.prefill))


def decode(pair: Pair, params: Mapping[str, Any]) -> Ask:
    """The client's request, and where its KV is."""
    return Ask(pair.path, {**pair.body, "kv_transfer_params": dict(params)}, _rank(pair.decode))


def let_go(pair: Pair, params: Mapping[str, Any]) -> tuple[tuple[Side, Ask], ...]:
    """A decode engine that refuses a request for its model's name tells the prefill engine to free what it keeps."""
    body = {"model": _NO_SUCH_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": dict(params)}
    return ((pair.decode, Ask("/v1/completions", body, _rank(pair.decode))),)


def _rank(side: Side) -> tuple[tuple[bytes, bytes], ...]:
    return () if side.rank is None else ((RANK, str(side.rank).encode()),)
