"""vLLM's MooncakeConnector: both legs at once, matched by a transfer's name; prefill sends once it has computed.

Decode finds the sender by the bootstrap server of the prefill engine and the name of the rank that computes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects import vllm
from gateway.dialects.fields import cached_tokens, finish_reasons, join_usage
from gateway.dialects.protocol import Ask, Body, Handoff, NoHandoff, Pair, Side


class Mooncake:
    """Prefill sends only what ended for its length; decode would wait for anything else for ever."""

    concurrent = True

    def whole(self, body: Body) -> str | None:
        return vllm.whole(body)

    def prefill(self, pair: Pair) -> Ask:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer(pair)}
        return vllm.prefill(pair, params)

    def handoff(self, pair: Pair, answer: Mapping[str, Any]) -> Handoff:
        reasons = finish_reasons(answer)
        if not reasons or any(reason != "length" for reason in reasons):
            ended = "stop" in reasons
            raise NoHandoff("first_token_ended" if ended else "prefill_not_finished", faulty=not ended)
        return Handoff(cached_tokens=cached_tokens(answer), answer=answer)

    def decode(self, pair: Pair, handoff: Handoff | None) -> Ask:
        return vllm.decode(pair, _source(pair))

    def let_go(self, pair: Pair, handoff: Handoff | None) -> tuple[tuple[Side, Ask], ...]:
        """Also where prefill was not heard to end: it may have, and then keeps what nobody comes for."""
        return vllm.let_go(pair, _source(pair))

    def join(self, body: Body, payload: dict[str, Any], handoff: Handoff, first: bool) -> None:
        join_usage(payload, handoff)


def _transfer(pair: Pair) -> str:
    return f"xfer-{pair.request_id}"


def _source(pair: Pair) -> dict[str, Any]:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://{pair.prefill.engine.bootstrap}",
        "remote_engine_id": pair.prefill.engine_id,
        "transfer_id": _transfer(pair),
    }
