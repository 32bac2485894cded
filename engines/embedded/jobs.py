"""What the engine knows of a job, and whether it can run at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache

from engines.embedded.pages import Export, PageMemory
from engines.embedded.sampling import Sampler, check_sampling
from engines.protocol import GenerateCommand, PrefillCommand
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

    def check_prefill(self, command: PrefillCommand, memory: PageMemory) -> PageTable:
        """Where the export goes. Raises Unfit."""
        self._check_tokens(command.token_ids)
        if not 0 <= command.start < command.stop <= len(command.token_ids):
            raise Unfit("range", f"[{command.start}, {command.stop}) is no range of {len(command.token_ids)} tokens")
        return self._table(command.start, command.stop, command.pages, memory)

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
        if command.loaded == 0:
            return None
        if command.loaded != len(command.token_ids) - 1:
            raise Unfit("loaded", f"loaded must be 0 or {len(command.token_ids) - 1}, got {command.loaded}")
        return self._table(0, command.loaded, command.pages, memory)

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
            return PageGeometry(self.layout, self.block_tokens, memory.page_bytes).table(start, stop, pages)
        except ValueError as error:
            raise Unfit("pages", str(error)) from error


@dataclass(slots=True)
class Prefill:
    """Tokens [0, stop) to compute, to export (``export``) or to speak after in place (``then``)."""

    job: str
    ids: torch.Tensor
    stop: int
    rank: tuple[int, int]
    export: Export | None = None
    then: GenerateCommand | None = None
    cache: Cache | None = None
    done: int = 0
    started: float = 0.0


@dataclass(slots=True)
class Row:
    """One generation in the decode batch: ``token`` at ``position`` is its next input."""

    job: str
    cache: Cache
    sampler: Sampler
    token: int
    position: int
    left: int


@dataclass(slots=True)
class Waiting:
    """A generation that waits for a place."""

    command: GenerateCommand
    table: PageTable | None = field(repr=False)
