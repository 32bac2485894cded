"""vLLM's NixlConnector, pulling: decode reads the blocks that prefill kept, under a lease that it renews itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects import nixl, vllm
from gateway.dialects.fields import join_usage
from gateway.dialects.protocol import Ask, Body, Handoff, Pair, Side


class NixlPull:
    """Prefill first; what it answers goes to decode as it is."""

    concurrent = False

    def whole(self, body: Body) -> str | None:
        return vllm.whole(body)

    def prefill(self, pair: Pair) -> Ask:
        return nixl.prefill(pair)

    def handoff(self, pair: Pair, answer: Mapping[str, Any]) -> Handoff:
        return nixl.handoff(answer, "pull")

    def decode(self, pair: Pair, handoff: Handoff | None) -> Ask:
        assert handoff is not None
        return vllm.decode(pair, handoff.params)

    def let_go(self, pair: Pair, handoff: Handoff | None) -> tuple[tuple[Side, Ask], ...]:
        return () if handoff is None else vllm.let_go(pair, handoff.params)

    def join(self, body: Body, payload: dict[str, Any], handoff: Handoff, first: bool) -> None:
        join_usage(payload, handoff)
