"""SGLang's disaggregation: the same request to both at once, matched by a room; prefill waits until decode connects.

A batch of prompts has a room each. A decode server prefills nothing itself, so no request stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from gateway.dialects.fields import cached_tokens, finish_reasons, join_usage, wants_prompt_logprobs
from gateway.dialects.protocol import Ask, Body, Handoff, NoHandoff, Pair, Side


class Sglang:
    """Rooms of one batch follow each other; the first leads to the rank that was chosen."""

    concurrent = True

    def whole(self, body: Body) -> str | None:
        return None

    def prefill(self, pair: Pair) -> Ask:
        body = {name: value for name, value in pair.body.items() if name != "stream_options"}
        body |= {"stream": False} | _met(pair)
        if pair.prefill.rank is not None:
            body["routed_dp_rank"] = pair.prefill.rank
        return Ask(pair.path, body)

    def handoff(self, pair: Pair, answer: Mapping[str, Any]) -> Handoff:
        if "abort" in finish_reasons(answer):
            raise NoHandoff("prefill_aborted", faulty=True)
        return Handoff(cached_tokens=cached_tokens(answer), answer=answer)

    def decode(self, pair: Pair, handoff: Handoff | None) -> Ask:
        body = {**pair.body, **_met(pair)}
        if pair.decode.rank is not None:
            body["routed_dp_rank"] = pair.decode.rank
        if pair.prefill.rank is not None:
            body["disagg_prefill_dp_rank"] = pair.prefill.rank
        return Ask(pair.path, body)

    def let_go(self, pair: Pair, handoff: Handoff | None) -> tuple[tuple[Side, Ask], ...]:
        """It looks for closed connections every few seconds; a word ends the request at once."""
        return tuple(
            (side, Ask("/abort_request", {"rid": rid})) for rid in _rids(pair) for side in (pair.prefill, pair.decode)
        )

    def join(self, body: Body, payload: dict[str, Any], handoff: Handoff, first: bool) -> None:
        """The prompt's log-probabilities are known at prefill, the answer's at decode."""
        join_usage(payload, handoff)
        if first and wants_prompt_logprobs(body):
            theirs = {choice.get("index", 0): choice for choice in handoff.answer.get("choices") or ()}
            for choice in payload.get("choices") or ():
                _join_choice(choice, theirs.get(choice.get("index", 0), {}))


def batch(body: Body) -> int | None:
    """How many prompts there are, None where it is one that stands for itself."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return len(prompt) if several and isinstance(prompt, list) else None


def _rids(pair: Pair) -> list[str]:
    count = batch(pair.body)
    return [pair.request_id] if count is None else [f"{pair.request_id}-{at}" for at in range(count)]


def _met(pair: Pair) -> dict[str, Any]:
    """Where the two meet, and how they are called, one for each prompt of a batch."""
    parts = urlsplit(f"//{pair.prefill.engine.bootstrap}")
    ranks = pair.prefill.engine.ranks
    room = pair.room - pair.room % ranks + (pair.prefill.rank or 0)
    count, rids = batch(pair.body), _rids(pair)
    if count is None:
        return {
            "bootstrap_host": parts.hostname,
            "bootstrap_port": parts.port,
            "bootstrap_room": room,
            "rid": rids[0],
        }
    return {
        "bootstrap_host": [parts.hostname] * count,
        "bootstrap_port": [parts.port] * count,
        "bootstrap_room": [room + at * ranks for at in range(count)],
        "rid": rids,
    }


def _join_choice(choice: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Prefill lists the prompt's tokens and the one that it computed, decode the answer's, that one among them."""
    mine, before = choice.get("logprobs"), theirs.get("logprobs")
    if isinstance(mine, dict) and isinstance(before, dict):
        for name, values in mine.items():
            if isinstance(values, list) and isinstance(before.get(name), list):
                mine[name] = before[name][:-1] + values
    meta, known = choice.get("meta_info"), theirs.get("meta_info")
    if isinstance(meta, dict) and isinstance(known, dict):
        inputs = known.get("input_token_logprobs")
        if isinstance(inputs, list) and isinstance(meta.get("input_token_logprobs"), list):
            meta["input_token_logprobs"] = inputs + meta["input_token_logprobs"]
