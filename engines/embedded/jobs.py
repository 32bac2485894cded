"""What the engine knows of a job, and whether it can run at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache

from engines.embedded.offers import Copies
from engines.embedded.pages import Export, PageMemory
from engines.embedded.sampling import Sampler, check_sampling
from engines.protocol import Checkpoint, GenerateCommand, PrefillCommand
from kvcache.blocks import PageGeometry, PageTable
from kvcache.layout import KVLayout


class Unfit(Exception):
    """A job that this engine cannot run; ``cause`` is a stable word, the text names the field."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Limits:
    """What jobs are checked against."""

    layout: KVLayout
    block_tokens: int
    vocab_size: int
    context_tokens: int

    def check_prefill(self, command: PrefillCommand, memory: PageMemory) -> tuple[PageTable, PageTable | None]:
        """Where the export goes, and where its cached prefix lies, None without one. Raises Unfit."""
        self._check_tokens(command.token_ids)
        if not 0 <= command.start < command.stop <= len(command.token_ids):
            raise Unfit("range", f"[{command.start}, {command.stop}) is no range of {len(command.token_ids)} tokens")
        self._check_checkpoints(command.checkpoints, command.cached, command.stop)
        cached = self._cached("cached", command.cached, command.stop, command.cached_pages, memory)
        return self._table(command.start, command.stop, command.pages, memory), cached

    def check_generate(self, command: GenerateCommand, memory: PageMemory) -> PageTable | None:
        """Where the loaded KV lies, None without any. Raises Unfit."""
        self._check_tokens(command.token_ids)
        total = len(command.token_ids) + command.sampling.max_tokens
        if total > self.context_tokens:
            raise Unfit("context", f"prompt and max_tokens make {total} tokens, the context is {self.context_tokens}")
        try:
            check_sampling(command.sampling, self.vocab_size)
        except ValueError as error:
            raise Unfit("sampling", str(error)) from error
        prefix = len(command.token_ids) - 1
        self._check_checkpoints(command.checkpoints, command.loaded, prefix)
        keep = command.keep_from
        if keep is not None and (keep % self.block_tokens or not 0 <= keep <= prefix):
            raise Unfit("keep_from", f"keep_from must be a multiple of {self.block_tokens} up to {prefix}, got {keep}")
        if command.loaded == prefix:
            return self._table(0, prefix, command.pages, memory) if prefix else None
        return self._cached("loaded", command.loaded, prefix, command.pages, memory)

    def geometry(self, memory: PageMemory) -> PageGeometry:
        """How the layout lies in the pool's pages."""
        return PageGeometry(self.layout, self.block_tokens, memory.page_bytes)

    def _cached(
        self, field: str, tokens: int, stop: int, pages: tuple[int, ...], memory: PageMemory
    ) -> PageTable | None:
        """Where a prefix to go on from lies. Raises Unfit."""
        if tokens % self.block_tokens or not 0 <= tokens < max(1, stop):
            raise Unfit(field, f"{field} must be a multiple of {self.block_tokens} below {stop}, got {tokens}")
        return self._table(0, tokens, pages, memory) if tokens else None

    def _check_checkpoints(self, checkpoints: Sequence[Checkpoint], cached: int, stop: int) -> None:
        """Raise Unfit unless they are block-aligned, in order, and of what this job computes or holds."""
        before = cached
        for each in checkpoints:
            aligned = not each.start % self.block_tokens and not each.stop % self.block_tokens
            if not (aligned and 0 <= each.start <= each.stop <= stop and before < each.stop):
                raise Unfit("checkpoints", f"[{each.start}, {each.stop}) is none of a prefill of [{cached}, {stop})")
            before = each.stop

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise Unfit("token_ids", "a prompt has at least one token")
        if len(token_ids) > self.context_tokens:
            raise Unfit("context", f"a prompt of {len(token_ids)} tokens, the context is {self.context_tokens}")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise Unfit("token_ids", f"a token id is outside the vocabulary of {self.vocab_size}")

    def _table(self, start: int, stop: int, pages: tuple[int, ...], memory: PageMemory) -> PageTable:
        if min(pages, default=0) < 0 or max(pages, default=0) >= memory.pages:
            raise Unfit("pages", f"a page is outside the pool of {memory.pages}")
        if len(set(pages)) != len(pages):
            raise Unfit("pages", "a page is listed twice")
        try:
            return self.geometry(memory).table(start, stop, pages)
        except ValueError as error:
            raise Unfit("pages", str(error)) from error


@dataclass(slots=True)
class Prefill:
    """Tokens [``done``, stop) to compute, to export (``export``) or to speak after in place (``then``).

    What lies below ``done`` at the start is in ``cached``. ``checkpoints`` are those not offered yet.
    """

    job: str
    ids: torch.Tensor
    stop: int
    rank: tuple[int, int]
    export: Export | None = None
    then: GenerateCommand | None = None
    cached: PageTable | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    cache: Cache | None = None
    done: int = 0
    started: float = 0.0


@dataclass(slots=True)
class Row:
    """One generation in the decode batch: ``token`` at ``position`` is its next input.

    ``keep_from``: where the blocks begin that are offered at the end. ``states`` are copies from the last block
    boundary that a step reached.
    """

    job: str
    cache: Cache
    sampler: Sampler
    token: int
    position: int
    left: int
    keep_from: int | None = None
    states: Copies = field(default_factory=dict)


@dataclass(slots=True)
class Waiting:
    """A generation that waits for a place."""

    command: GenerateCommand
    table: PageTable | None = field(repr=False)
