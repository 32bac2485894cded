"""Small requests of random tokens, through nodes that are named: real work whose answer nobody reads."""

from __future__ import annotations

import secrets

from gateway.attempts import Attempt
from gateway.building import AttemptBuilder, Prompted
from gateway.failures import AttemptFailed
from gateway.model import ServedModel
from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.control import Delta, Finished, Sampling
from scheduler.decision import Option
from scheduler.facts import RequestFacts
from scheduler.sizes import size_facts

PROMPT_TOKENS = 130
"""Two blocks and a bit, so that every group of layers has something to send."""
ANSWER_TOKENS = 2


class Samples:
    """Builds them and sees them through."""

    def __init__(self, registry: Registry, builder: AttemptBuilder, model: ServedModel) -> None:
        self._registry = registry
        self._builder = builder
        self._model = model

    def attempt(
        self, purpose: str, prefill: NodeSession | None, decode: NodeSession, deadline_s: float, priority: int = 0
    ) -> Attempt:
        """One request, not yet dispatched; without a prefill node ``decode`` prefills in place."""
        count = min(PROMPT_TOKENS, self._registry.context_tokens - ANSWER_TOKENS)
        ids = tuple(secrets.randbelow(self._model.vocab_size) for _ in range(count))
        name = f"{purpose}-{secrets.token_hex(8)}"
        facts = RequestFacts(name, count, size_facts(self._model.layout))
        sampling = Sampling(ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        option = Option(
            cluster=None if prefill is None else prefill.join.cluster,
            prefill_node=None if prefill is None else prefill.node_id,
            decode_node=decode.node_id,
            compute_increment=count - 1,
            transfer_bytes=0 if prefill is None else self._model.layout.s_kv(count - 1),
            codec="raw",
            allowed=True,
            predicted_ttft_s=None,
        )
        return self._builder.build(Prompted(name, purpose, facts, ids, sampling), option, 1, priority, deadline_s)


async def see_through(attempt: Attempt, deadline_s: float) -> None:
    """Dispatch it and return when its answer was complete. Raises AttemptFailed, and TimeoutError for each wait."""
    attempt.dispatch()
    try:
        spoken = 0
        while not isinstance(item := await attempt.next(deadline_s), Finished):
            if isinstance(item, Delta):
                spoken += len(item.token_ids)
        if spoken != ANSWER_TOKENS:
            detail = f"{ANSWER_TOKENS} tokens were asked for, {spoken} came"
            raise AttemptFailed("decode", "protocol", detail, attempt.decode.node_id)
    finally:
        attempt.close("sample")
