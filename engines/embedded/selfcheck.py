"""Before the first job: does this model continue a chunked prefill, and how fast is it here?

Some architectures restart their recurrent state at every chunk and give fluent nonsense. So the start compares the
engine's way (own cache and attention, chunks, steps of one token) with that of transformers (its cache and attention,
one piece) on random tokens. Hidden states are compared where a lost state shows most, right behind each boundary, by
the median over tokens: a flipped expert choice moves single tokens in bf16, a lost state moves all of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from engines.embedded.cache import empty_cache
from engines.embedded.model import LanguageModel
from engines.embedded.ragged import join
from kvcache.layout import DType
from kvcache.plan import chunk_bounds

STEPS = 4
LARGEST_CHUNK = 256
BEHIND_BOUNDARY = 16
TOLERANCE = {DType.FLOAT32: 1e-3, DType.BFLOAT16: 0.08}


@dataclass(frozen=True, slots=True)
class Trial:
    """Hidden states of all tokens, (tokens, hidden), run in chunks and then steps; tokens per second of both."""

    hidden: Tensor
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def trial_tokens(vocab_size: int, chunk_tokens: int) -> Tensor:
    """Random ids, always the same ones: two chunks, a quarter of a third one, and the steps. Shape (tokens,)."""
    count = 2 * chunk_tokens + max(1, chunk_tokens // 4) + STEPS
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(1))


def run_in_chunks(model: LanguageModel, cache: Cache, ids: Tensor, chunk_tokens: int) -> Trial:
    """Run ``ids`` as the engine runs prompts: chunks, then ``STEPS`` single tokens with their logits."""
    hidden, chunk_s, step_s = [], [], []
    stop = ids.numel() - STEPS
    pieces = [*chunk_bounds(0, stop, chunk_tokens), *((n, n + 1) for n in range(stop, ids.numel()))]
    for begin, end in pieces:
        if begin == stop:
            cache = join([cache])
        started = time.perf_counter()
        out = model.hidden(ids[None, begin:end], torch.arange(begin, end)[None], cache)
        if begin >= stop:
            model.logits(out[:, -1]).argmax()
            step_s.append(time.perf_counter() - started)
        elif end - begin == chunk_tokens:
            chunk_s.append(time.perf_counter() - started)
        hidden.append(out[0])
    return Trial(torch.cat(hidden), chunk_tokens / min(chunk_s), 1 / min(step_s))


def worst_error(chunked: Tensor, whole: Tensor, chunk_tokens: int) -> float:
    """The largest median relative error of hidden states behind any boundary of chunks, or over the steps."""
    error = (chunked - whole).float().norm(dim=-1) / whole.float().norm(dim=-1)
    stop = error.numel() - STEPS
    behind = [error[b : min(b + BEHIND_BOUNDARY, stop)] for b in range(chunk_tokens, stop, chunk_tokens)]
    return max(float(stretch.median()) for stretch in [*behind, error[stop:]])


def try_out(model: LanguageModel, dtype: DType, chunk_tokens: int, compare: bool) -> Trial:
    """Run the engine's way on chunks of at most ``LARGEST_CHUNK`` and, if told to, ``compare`` with the other way.

    Raises ValueError, with the figure, where they differ by more than rounding.
    """
    chunk_tokens = min(chunk_tokens, LARGEST_CHUNK)
    ids = trial_tokens(model.vocab_size, chunk_tokens)
    if not compare:
        return run_in_chunks(model, empty_cache(model.layout, ids.numel()), ids, chunk_tokens)
    with model.plain_attention():
        whole = model.hidden(ids[None], torch.arange(ids.numel())[None], DynamicCache(config=model.config))[0]
    trial = run_in_chunks(model, empty_cache(model.layout, ids.numel()), ids, chunk_tokens)
    error = worst_error(trial.hidden, whole, chunk_tokens)
    if not error <= TOLERANCE[dtype]:
        raise ValueError(
            f"self-check: prefill in chunks of {chunk_tokens} differs from prefill in one piece by {error:.2g} of the "
            f"hidden states (at most {TOLERANCE[dtype]:.2g} in {dtype}); this model must not be served in chunks"
        )
    return trial
