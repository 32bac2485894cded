"""vLLM's NixlPushConnector: decode registers its own blocks with prefill, which writes into them.

It does not matter to decode where the blocks lie at prefill, and it must not be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects import nixl, vllm
from gateway.dialects.fields import join_usage
from gateway.dialects.protocol import Ask, Body, Handoff, Pair, Side


class NixlPush:
    """Prefill first; what it answers goes to decode without the blocks."""

    concurrent = False

    def whole(self, body: Body) -> str | None:
        return vllm.whole(body)

    def prefill(self, pair: Pair) -> Ask:
        return nixl.prefill(pair)

    def handoff(self, pair: Pair, answer: Mapping[str, Any]) -> Handoff:
        return nixl.handoff(answer, "push")

    def decode(self, pair: Pair, handoff: Handoff | None) -> Ask:
        assert handoff is not None
        return vllm.decode(pair, _told(handoff))

    def let_go(self, pair: Pair, handoff: Handoff | None) -> tuple[tuple[Side, Ask], ...]:
        return () if handoff is None else vllm.let_go(pair, _told(handoff))

    def join(self, body: Body, payload: dict[str, Any], handoff: Handoff, first: bool) -> None:
        join_usage(payload, handoff)


def _told(handoff: Handoff) -> dict[str, Any]:
    return {name: value for name, value in handoff.params.items() if name != "remote_block_ids"}
