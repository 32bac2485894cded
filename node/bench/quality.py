"""What a model says after its cache went through a codec, next to what it says without.

A prefix is prefilled once. Then the text's next positions are read in one pass, as they are, over the cache as it was
and over the cache as it arrived: logits at each position, compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from engines.embedded.cache import empty_cache
from engines.embedded.model import LanguageModel, load
from engines.embedded.pages import Export, PageMemory
from engines.embedded.pages import load as load_pages
from engines.embedded.ragged import join
from engines.spec import EngineSpec
from kvcache.layout import DType, KVLayout
from kvcache.plan import chunk_bounds
from node.bench.captured import Captured

_NOISE_STEPS = 8


@dataclass(slots=True)
class Agreement:
    """Over all positions so far. ``counted`` are those whose best token leads by more than the batch noise."""

    counted: int = 0
    agreed: int = 0
    same: int = 0
    positions: int = 0
    kl_sum: float = 0.0
    worst_error: float = field(default=0.0)

    def add(self, reference: Tensor, found: Tensor, noise: float, error: float) -> None:
        """Compare logits, (positions, vocabulary) each; ``error`` is the cache's largest."""
        best = reference.topk(2).values
        counts = best[:, 0] - best[:, 1] > noise
        same = reference.argmax(-1) == found.argmax(-1)
        before, after = reference.log_softmax(-1), found.log_softmax(-1)
        self.kl_sum += float((before.exp() * (before - after)).sum())
        self.counted += int(counts.sum())
        self.agreed += int((same & counts).sum())
        self.same += int(same.sum())
        self.positions += len(reference)
        self.worst_error = max(self.worst_error, error)


class Reader:
    """A model on one thread, as the embedded engine runs it."""

    def __init__(self, model_dir: Path, dtype: DType, chunk_tokens: int) -> None:
        """Raises ValueError or OSError for a model that the engine does not run."""
        torch.set_num_threads(1)
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        self._chunk_tokens = chunk_tokens
        self._model: LanguageModel = load(EngineSpec(model_dir, dtype, chunk_tokens=chunk_tokens), config)

    @property
    def layout(self) -> KVLayout:
        """Of the model's cache."""
        return self._model.layout

    @torch.inference_mode()
    def capture(self, ids: Sequence[int], tokens: int) -> Captured:
        """Prefill the first ``tokens`` of ``ids`` on the chunk grid and export the cache, as for a transfer."""
        captured = Captured.room(self.layout, ids, tokens, self._chunk_tokens)
        memory, cache = PageMemory(captured.pool), empty_cache(self.layout, tokens)
        export = Export(captured.plan, captured.table, memory, lambda _: None)
        prefix = torch.tensor([ids[:tokens]])
        for begin, end in chunk_bounds(0, tokens, self._chunk_tokens):
            self._model.after_layer = lambda index, end=end: export.after_layer(cache, index, end)
            try:
                self._model.hidden(prefix[:, begin:end], torch.arange(begin, end)[None], cache)
            finally:
                self._model.after_layer = None
        assert export.complete
        return captured

    @torch.inference_mode()
    def read(self, captured: Captured) -> Tensor:
        """Logits at every position after the prefix, (positions, vocabulary)."""
        start, stop = captured.plan.stop, len(captured.ids)
        cache = empty_cache(self.layout, stop)
        load_pages(cache, captured.table, PageMemory(captured.pool))
        ids = torch.tensor([captured.ids[start:stop]])
        return self._model.logits(self._model.hidden(ids, torch.arange(start, stop)[None], cache)[0])

    @torch.inference_mode()
    def batch_noise(self, prefixes: Sequence[Captured]) -> float:
        """Twice the largest difference that it makes to logits whether requests are run one by one or together."""
        alone: list[Cache] = []
        together: list[Cache] = []
        for captured in prefixes:
            for caches in (alone, together):
                cache = empty_cache(self.layout, captured.plan.stop + _NOISE_STEPS)
                load_pages(cache, captured.table, PageMemory(captured.pool))
                caches.append(cache)
        batch, largest = join(together), 0.0
        for step in range(_NOISE_STEPS):
            ids = torch.tensor([[captured.ids[captured.plan.stop + step]] for captured in prefixes])
            positions = torch.tensor([[captured.plan.stop + step] for captured in prefixes])
            crowd = self._model.logits(self._model.hidden(ids, positions, batch)[:, -1])
            for row, cache in enumerate(alone):
                one = slice(row, row + 1)
                solo = self._model.logits(self._model.hidden(ids[one], positions[one], cache)[:, -1])
                largest = max(largest, float((solo[0] - crowd[row]).abs().max()))
        return 2 * largest
