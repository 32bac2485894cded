"""How fast a vLLM server is, from two short requests of random tokens: the first of each kind only warms it up."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from engines.vllm.api import VllmApi

DECODE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second, of one request that has the server for itself."""

    prefill: float
    decode: float


async def measure(api: VllmApi, vocab: int, tokens: int) -> Rates:
    """Prefill ``tokens`` tokens at a time, and speak a few."""
    seconds = 0.0
    for number in range(2):
        source = random.Random(number)  # noqa: S311 (measures only)
        body = {
            "token_ids": [source.randrange(vocab) for _ in range(tokens)],
            "sampling_params": {
                "max_tokens": DECODE_TOKENS,
                "temperature": 0.0,
                "ignore_eos": True,
                "detokenize": False,
            },
        }
        began = time.monotonic()
        first = last = began
        said = 0
        async for choice in api.stream(body):
            last = time.monotonic()
            first = first if said else last
            said += len(choice["token_ids"])
        seconds, spoken = first - began, last - first
    return Rates(round(tokens / seconds, 1), round((DECODE_TOKENS - 1) / max(spoken, 1e-6), 1))
