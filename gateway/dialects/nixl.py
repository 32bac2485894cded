"""What both directions of vLLM's NixlConnector share: prefill answers where its blocks lie, and keeps them a while.

Only what is complete is handed on: a decode engine that misses a field recomputes the prompt without a word, and one
that gets an empty list of blocks dies of an assertion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects import vllm
from gateway.dialects.fields import cached_tokens, finish_reasons
from gateway.dialects.protocol import Ask, Handoff, NoHandoff, Pair

_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")


def prefill(pair: Pair) -> Ask:
    """Compute, and keep the blocks for somebody else to decode from."""
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    params |= {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    return vllm.prefill(pair, params)


def handoff(answer: Mapping[str, Any], mode: str) -> Handoff:
    """Where the blocks are. Raises NoHandoff."""
    params = answer.get("kv_transfer_params")
    if not isinstance(params, dict):
        ended = "stop" in finish_reasons(answer)
        raise NoHandoff("first_token_ended" if ended else "no_kv_transfer_params", faulty=not ended)
    if params.get("transfer_mode", mode) != mode:
        raise NoHandoff("other_transfer_mode", faulty=True)
    if params.get("do_remote_prefill") is not True or any(params.get(name) is None for name in _NEEDED):
        raise NoHandoff("kv_transfer_params_incomplete", faulty=True)
    groups = params.get("remote_block_ids")
    if not isinstance(groups, list) or not any(groups):
        raise NoHandoff("no_blocks", faulty=True)
    told = params.get("remote_prefill_cached_tokens")
    return Handoff(params, told if type(told) is int else cached_tokens(answer), answer)
