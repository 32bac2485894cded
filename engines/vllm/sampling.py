"""How to choose tokens, in vLLM's words, and what it chose, in ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcache.control import Sampling, TokenLogprob


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """vLLM's ``sampling_params``. Stop strings are not among them: whoever turns tokens into text looks for those.

    One more of the likeliest tokens is asked for than is wanted: vLLM counts the chosen one among them.
    """
    wanted = sampling.logprobs
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": wanted if wanted is None or wanted < 0 else wanted + 1,
        "detokenize": False,
    }
    if sampling.seed is not None:
        params["seed"] = (sampling.seed + 2**63) % 2**64 - 2**63
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return params


def token_logprobs(content: Mapping[str, Any], wanted: int) -> tuple[TokenLogprob, ...]:
    """One token's log-probabilities: the chosen one's, then the ``wanted`` likeliest (-1: all), from vLLM's entry."""
    chosen = TokenLogprob(content["token_id"], content["logprob"])
    found: Sequence[Mapping[str, Any]] = content.get("top_logprobs") or []
    best = sorted((TokenLogprob(each["token_id"], each["logprob"]) for each in found), key=lambda each: -each.logprob)
    return (chosen, *(best if wanted < 0 else best[:wanted]))
