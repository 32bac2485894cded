"""A small piece of real work through a node that has just changed its role, before clients' requests go there."""

from __future__ import annotations

import asyncio

from gateway.executors import ConversionFailed
from gateway.failures import AttemptFailed
from gateway.registry import Registry
from gateway.samples import Samples, see_through
from gateway.sessions import NodeSession
from kvcache.wire import Role

DEADLINE_S = 60.0


class Verification:
    """Runs one request of random tokens: the node prefills for a decode node, or decodes what another prefilled."""

    def __init__(self, registry: Registry, samples: Samples) -> None:
        self._registry = registry
        self._samples = samples

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
        try:
            await see_through(self._samples.attempt("verify", prefill, decode, DEADLINE_S), DEADLINE_S)
        except AttemptFailed as failure:
            raise ConversionFailed("verify", f"{failure.stage}: {failure.cause}: {failure.detail[:200]}") from failure
        await asyncio.sleep(0)
