"""How fast this node is, learnt from its own jobs: what its heartbeats say."""

from __future__ import annotations

import asyncio

from kvcache.control import Cancelled, Delta, Failed, Finished, FromNode, PrefillDone

SHORTEST_S = 0.005
WEIGHT = 0.3
TELLING_TOKENS = 256
"""A prefill of fewer tokens is mostly fixed cost; what it teaches counts in proportion."""


class Rates:
    """Sees every message to the gateway go by. Rates are tokens per second, 0 while nothing was measured."""

    def __init__(self) -> None:
        self.prefill = 0.0
        self.decode = 0.0
        self._first_said: dict[str, float] = {}

    def measured(self, prefill: float, decode: float) -> None:
        """What an engine measured of itself when it started; it counts until a job says otherwise."""
        self.prefill = self.prefill or prefill
        self.decode = self.decode or decode

    def observe(self, message: FromNode) -> None:
        """Learn from a message of a job, if it holds a measurement."""
        match message:
            case PrefillDone(compute_s=compute_s, tokens=tokens):
                self.prefill = _learn(self.prefill, tokens, compute_s, min(1.0, tokens / TELLING_TOKENS))
            case Delta(generation=generation):
                self._first_said.setdefault(generation, asyncio.get_running_loop().time())
            case Finished(generation=generation, completion_tokens=tokens):
                first = self._first_said.pop(generation, None)
                if first is not None:
                    self.decode = _learn(self.decode, tokens - 1, asyncio.get_running_loop().time() - first)
            case Failed(job=job) | Cancelled(job=job):
                self._first_said.pop(job, None)


def _learn(rate: float, tokens: int, seconds: float, share: float = 1.0) -> float:
    """The rate after one more measurement, of which ``share`` counts; very short ones teach nothing."""
    if seconds < SHORTEST_S or tokens < 1:
        return rate
    seen = tokens / seconds
    return seen if rate <= 0 else rate + share * WEIGHT * (seen - rate)
