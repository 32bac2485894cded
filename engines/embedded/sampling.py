"""Choosing tokens for one request: greedy, temperature, top-k, top-p, each with a generator of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcache.control import Sampling, TokenLogprob

TOP_P_CANDIDATES = 1024
LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError naming the field that no sampler can follow."""
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {sampling.max_tokens}")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"temperature must not be negative, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {sampling.top_p}")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must not be negative, got {sampling.top_k}")
    if sampling.logprobs is not None and not -1 <= sampling.logprobs <= vocab_size:
        raise ValueError(f"logprobs must be from -1 to {vocab_size}, got {sampling.logprobs}")
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**64:
        raise ValueError("seed must fit into 64 bits")


class Sampler:
    """One request's choices. Equal seeds and equal logits give equal tokens, whatever else runs beside it."""

    def __init__(self, sampling: Sampling, end_tokens: tuple[int, ...]) -> None:
        self._sampling = sampling
        self._ends = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else end_tokens)
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def ends(self, token: int) -> bool:
        """Whether this token ends the answer instead of being part of it."""
        return token in self._ends

    def choose(self, logits: Tensor) -> int:
        """Pick a token by fp32 logits (vocabulary). Raises ValueError or RuntimeError where they are no numbers."""
        sampling = self._sampling
        if sampling.temperature == 0 or sampling.top_k == 1:
            best = int(logits.argmax())
            if not math.isfinite(logits[best]):
                raise ValueError("the best logit is no number")
            return best
        # The best one's score is 0 at every temperature: however low that is, nothing divides to infinity.
        scores = (logits - logits.max()) / max(sampling.temperature, LEAST_TEMPERATURE)
        candidates: Tensor | None = None
        if 0 < sampling.top_k < scores.numel():
            scores, candidates = scores.topk(sampling.top_k)
        probabilities = scores.softmax(dim=-1)
        if sampling.top_p < 1:
            probabilities, kept = _nucleus(probabilities, sampling.top_p)
            candidates = kept if candidates is None else candidates[kept]
        choice = int(torch.multinomial(probabilities, 1, generator=self._generator))
        return choice if candidates is None else int(candidates[choice])

    def logprobs(self, logits: Tensor, token: int) -> tuple[TokenLogprob, ...] | None:
        """The chosen token's log-probability, then the likeliest n (the chosen one again, where it is among them)."""
        wanted = self._sampling.logprobs
        if wanted is None:
            return None
        logs = logits.log_softmax(dim=-1)
        values, ids = logs.topk(logs.numel() if wanted == -1 else wanted)
        chosen = TokenLogprob(token, float(logs[token]))
        return (chosen, *map(TokenLogprob, ids.tolist(), values.tolist()))


def _nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of likeliest tokens whose probabilities reach ``top_p``: (probabilities, their indices).

    Sorting a large vocabulary is slow, so the head of it is tried first.
    """
    for count in (min(TOP_P_CANDIDATES, probabilities.numel()), probabilities.numel()):
        values, ids = probabilities.topk(count)
        before = values.cumsum(dim=-1) - values
        if count == probabilities.numel() or float(before[-1]) >= top_p:
            break
    keep = int((before < top_p).sum().clamp(min=1))
    return values[:keep], ids[:keep]
