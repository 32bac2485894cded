"""One prefill, chunk by chunk: begin from what is cached, export, and offer what is worth keeping."""

from __future__ import annotations

import time

import torch
from transformers.cache_utils import Cache

from engines.embedded.cache import empty_cache
from engines.embedded.jobs import Prefill
from engines.embedded.model import LanguageModel
from engines.embedded.offers import Offer, OfferDesk, copy_states, copy_windows
from engines.embedded.pages import PageMemory, load
from engines.spec import EngineSpec
from kvcache.blocks import PageTable
from kvcache.layout import GroupKind


class PrefillWork:
    """Runs chunks of any prefill on one model."""

    def __init__(self, model: LanguageModel, spec: EngineSpec, memory: PageMemory, desk: OfferDesk) -> None:
        self._model = model
        self._spec = spec
        self._memory = memory
        self._desk = desk
        self.has_states = any(group.kind is GroupKind.STATE for group in model.layout.groups)
        """Whether the model has tensors that are valid at one position only."""

    def cache(self, expected: int, table: PageTable | None) -> Cache:
        """A cache for ``expected`` tokens, with those in ``table``."""
        cache = empty_cache(self._model.layout, expected, slack=self._spec.block_tokens)
        if table is not None:
            load(cache, table, self._memory)
        return cache

    def run_chunk(self, prefill: Prefill) -> None:
        """Run the prefill's next chunk, export what it released and offer what it completed."""
        export = prefill.export
        if prefill.started == 0.0:
            prefill.started = time.monotonic()
            if prefill.cache is None:
                prefill.cache = self.cache(prefill.stop, prefill.cached)
            if export is not None:
                export.begin()
        begin, end, cache = prefill.done, self._chunk_end(prefill), prefill.cache
        assert cache is not None
        if export is not None:
            self._model.after_layer = lambda index: export.after_layer(cache, index, end)
        try:
            self._model.hidden(prefill.ids[None, begin:end], torch.arange(begin, end)[None], cache)
        finally:
            self._model.after_layer = None
        prefill.done = end
        assert end < prefill.stop or export is None or export.complete, "pieces were left behind"
        self._offer_checkpoints(prefill, cache)

    def _chunk_end(self, prefill: Prefill) -> int:
        """The next boundary of the absolute grid. A state is valid at one position only: a snapshot of it ends a chunk.

        ``checkpoints`` are in order and lie ahead.
        """
        grid = self._spec.chunk_tokens
        end = min(prefill.stop, (prefill.done // grid + 1) * grid)
        wanted = (each.stop for each in prefill.checkpoints if each.snapshot and self.has_states)
        return min([end, *wanted])

    def _offer_checkpoints(self, prefill: Prefill, cache: Cache) -> None:
        while prefill.checkpoints and prefill.checkpoints[0].stop <= prefill.done:
            each, prefill.checkpoints = prefill.checkpoints[0], prefill.checkpoints[1:]
            ends = None
            if each.snapshot:
                layout = self._model.layout
                ends = copy_states(layout, cache) | copy_windows(layout, cache, each.stop)
            self._desk.offer(prefill.job, Offer(each.start, each.stop, cache, ends))
