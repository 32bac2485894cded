"""A small piece of real work through a node that has just changed its role, before clients' requests go there."""

from __future__ import annotations

import asyncio
import secrets

from gateway.attempts import Attempt
from gateway.building import AttemptBuilder, Prompted
from gateway.executors import ConversionFailed
from gateway.failures import AttemptFailed
from gateway.model import ServedModel
from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.control import Delta, Finished, Sampling
from kvcache.wire import Role
from scheduler.decision import Option
from scheduler.facts import RequestFacts
from scheduler.sizes import size_facts

PROMPT_TOKENS = 130
"""Two blocks and a bit, so that every group of layers has something to send."""
ANSWER_TOKENS = 2
DEADLINE_S = 60.0


class Verification:
    """Runs one request of random tokens: the node prefills for a decode node, or decodes what another prefilled."""

    def __init__(self, registry: Registry, builder: AttemptBuilder, model: ServedModel) -> None:
        self._registry = registry
        self._builder = builder
        self._model = model

    async def __call__(self, node: NodeSession, role: Role) -> None:
        """Return when the answer was complete. Raises ConversionFailed."""
        local = self._registry.local_cluster
        partners = [
            other
            for other in self._registry.nodes(local, Role.DECODE if role is Role.PREFILL else Role.PREFILL)
            if other is not node and other.accepting
        ]
        partner = partners[0] if partners else None
        if role is Role.PREFILL and partner is None:
            raise ConversionFailed("verify", "no decode node accepts work that it could prefill for")
        prefill, decode = (node, partner) if role is Role.PREFILL else (partner, node)
        assert decode is not None
        attempt = self._attempt(prefill, decode)
        attempt.dispatch()
        try:
            spoken = 0
            while not isinstance(item := await attempt.next(DEADLINE_S), Finished):
                spoken += len(item.token_ids) if isinstance(item, Delta) else 0
        except AttemptFailed as failure:
            raise ConversionFailed("verify", f"{failure.stage}: {failure.cause}: {failure.detail[:200]}") from failure
        finally:
            attempt.close("verification")
        if spoken != ANSWER_TOKENS:
            raise ConversionFailed("verify", f"{ANSWER_TOKENS} tokens were asked for, {spoken} came")
        await asyncio.sleep(0)

    def _attempt(self, prefill: NodeSession | None, decode: NodeSession) -> Attempt:
        count = min(PROMPT_TOKENS, self._registry.context_tokens - ANSWER_TOKENS)
        ids = tuple(secrets.randbelow(self._model.vocab_size) for _ in range(count))
        name = f"verify-{secrets.token_hex(8)}"
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
        return self._builder.build(Prompted(name, "verification", facts, ids, sampling), option, 1, 0, DEADLINE_S)
