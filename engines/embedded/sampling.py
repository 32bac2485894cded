"""Choosing tokens for one request: penalties and biases, temperature, top-k, top-p, min-p, a generator of its own.

The order is vLLM's: bias, repetition, frequency and presence penalty on the logits, then temperature and what bars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcache.control import Sampling, TokenLogprob

TOP_P_CANDIDATES = 1024
LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
MOST_PENALTY = 2.0
MOST_BIAS = 100.0


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
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p must lie in [0, 1], got {sampling.min_p}")
    for field in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, field)
        if not -MOST_PENALTY <= value <= MOST_PENALTY:
            raise ValueError(f"{field} must lie in [-{MOST_PENALTY:g}, {MOST_PENALTY:g}], got {value}")
    if not 0 < sampling.repetition_penalty <= MOST_PENALTY:
        raise ValueError(f"repetition_penalty must lie in (0, {MOST_PENALTY:g}], got {sampling.repetition_penalty}")
    ids = [token for token, _ in sampling.logit_bias]
    if not all(0 <= token < vocab_size for token in ids) or len(set(ids)) < len(ids):
        raise ValueError(f"logit_bias must name tokens below {vocab_size}, each once")
    if not all(-MOST_BIAS <= bias <= MOST_BIAS for _, bias in sampling.logit_bias):
        raise ValueError(f"logit_bias must lie in [-{MOST_BIAS:g}, {MOST_BIAS:g}]")


class Sampler:
    """One request's choices. Equal seeds and equal logits give equal tokens, whatever else runs beside it."""

    def __init__(self, sampling: Sampling, end_tokens: tuple[int, ...], prompt_ids: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._penalties = Penalties(sampling, prompt_ids) if sampling.adjusts else None
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
        if self._penalties is None:
            return self._pick(logits)
        token = self._pick(self._penalties.applied(logits))
        self._penalties.said(token)
        return token

    def _pick(self, logits: Tensor) -> int:
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
        if sampling.min_p > 0:
            probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0.0)
        choice = int(torch.multinomial(probabilities, 1, generator=self._generator))
        return choice if candidates is None else int(candidates[choice])

    def logprobs(self, logits: Tensor, token: int) -> tuple[TokenLogprob, ...] | None:
        """The chosen token's log-probability, then the likeliest n (the chosen one again, where it is among them).

        By the model's own logits, before penalties and biases.
        """
        wanted = self._sampling.logprobs
        if wanted is None:
            return None
        logs = logits.log_softmax(dim=-1)
        values, ids = logs.topk(logs.numel() if wanted == -1 else wanted)
        chosen = TokenLogprob(token, float(logs[token]))
        return (chosen, *map(TokenLogprob, ids.tolist(), values.tolist()))


class Penalties:
    """What one request adds to and takes from logits, and the tokens that it does so for."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._bias_ids = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([bias for _, bias in sampling.logit_bias])
        self._counts: dict[int, int] = {}
        self._seen = dict.fromkeys(prompt_ids if sampling.repetition_penalty != 1 else ())

    def applied(self, logits: Tensor) -> Tensor:
        """A changed copy of fp32 logits (vocabulary)."""
        sampling, changed = self._sampling, logits.clone()
        changed[self._bias_ids] += self._bias
        if sampling.repetition_penalty != 1 and self._seen:
            ids = torch.tensor(list(self._seen))
            held = changed[ids]
            weaker, stronger = held / sampling.repetition_penalty, held * sampling.repetition_penalty
            changed[ids] = torch.where(held > 0, weaker, stronger)
        if self._counts and (sampling.frequency_penalty or sampling.presence_penalty):
            ids = torch.tensor(list(self._counts))
            times = torch.tensor(list(self._counts.values()), dtype=changed.dtype)
            changed[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty
        return changed

    def said(self, token: int) -> None:
        """The answer has this token now."""
        self._counts[token] = self._counts.get(token, 0) + 1
        self._seen[token] = None


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
