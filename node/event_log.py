"""What a node's prefix cache has done, as numbered batches of events: the newest are kept for whoever missed some.

Changes are gathered for some milliseconds, so that a burst is one batch and not hundreds. Only exact blocks are told:
no event says how exact a block is, and those can serve every request.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from kvcache.held import FILES
from kvcache.kept import EntryKind, StoredBlock
from kvcache.kv_events import (
    NO_EXTRAS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    encode_batch,
    encode_extras,
)
from kvcache.quality import Quality
from kvcache.tiers.telling import MEMORY

FULL_GROUP, SNAPSHOT_GROUP = 0, 1
FULL_KIND = "full_attention"
GATHER_S = 0.02
BATCH_TOKENS = 1 << 15
BATCH_BLOCKS = 1 << 12
KEPT_BATCHES = 10_000
KEPT_BYTES = 32 << 20

OnBatch = Callable[[int, bytes], None]


class Stored(Protocol):
    """A prefix cache that can say all that it holds."""

    def stored(self) -> Iterator[StoredBlock]:
        """Every block, parents first."""

    def stored_snapshots(self) -> Iterator[tuple[bytes, Quality]]:
        """Every snapshot: the block at whose end it lies, and its quality."""


class InFiles(Protocol):
    """Tiers that can say what is in files and not in the pool, as ``Stored`` does."""

    def stored_in_files(self) -> Iterator[StoredBlock]:
        """Blocks, parents first."""

    def snapshots_in_files(self) -> Iterator[tuple[bytes, Quality]]:
        """Snapshots."""


class EventLog:
    """Is told by the cache (a ``CacheListener``, with tiers a ``MediumListener``), numbers it, calls ``on_batch`` then.

    ``snapshot_kind`` is how the model's windows or states are called in events. All calls come from the event loop.
    """

    def __init__(self, block_tokens: int, snapshot_kind: str) -> None:
        self._block_tokens = block_tokens
        self._snapshot_kind = snapshot_kind
        self._pending: list[KvEvent] = []
        self._pending_tokens = self._pending_blocks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._allowed_bytes = KEPT_BYTES
        self._restated_at = -1
        self.next_seq = 0
        self.tiers: InFiles | None = None
        self.on_batch: list[OnBatch] = []

    @property
    def first_seq(self) -> int:
        """The number of the oldest batch that is kept; ``next_seq`` where none is."""
        return self.next_seq - len(self._kept)

    @property
    def whole_from(self) -> int | None:
        """Where the last restatement begins, if all of it and all that came after it is kept still."""
        return self._restated_at if self._restated_at >= max(0, self.first_seq) else None

    def batch(self, seq: int) -> bytes:
        """A kept batch."""
        assert self.first_seq <= seq < self.next_seq
        return self._kept[seq - self.first_seq]

    def kept_from(self, seq: int) -> list[tuple[int, bytes]]:
        """What is kept from a number on."""
        return [(number, self.batch(number)) for number in range(max(seq, self.first_seq), self.next_seq)]

    # ---- what the cache tells

    def stored(self, blocks: Sequence[StoredBlock], medium: str = MEMORY) -> None:
        """Blocks can be used from now on, parents first."""
        self._add(_runs(blocks, self._block_tokens, medium))

    def snapshot(self, hash: bytes, quality: Quality, medium: str = MEMORY) -> None:
        """Windows and states at the end of block ``hash`` can be used from now on."""
        if quality is Quality.EXACT:
            self._add([self._snapshot_event(hash, medium)])

    def removed(self, hashes: Sequence[bytes], kind: EntryKind, medium: str = MEMORY) -> None:
        """These blocks, or the snapshots at their ends, are gone from there."""
        group = FULL_GROUP if kind is EntryKind.BLOCK else SNAPSHOT_GROUP
        parts = (hashes[at : at + BATCH_BLOCKS] for at in range(0, len(hashes), BATCH_BLOCKS))
        self._add(BlockRemoved(tuple(part), medium, group) for part in parts)

    # ---- batches

    def restate(self, cache: Stored) -> int:
        """Begin anew: a batch that clears everything, then all that is held. Returns the first one's number.

        What was kept from before has no meaning any more and goes. All of the new is kept, however much it is: it takes
        less than a thousandth of the KV that it speaks of.
        """
        self.flush()
        self._kept.clear()
        self._kept_bytes = 0
        self._allowed_bytes = sys.maxsize
        first = self._restated_at = self.next_seq
        self._add([AllBlocksCleared()])
        self._restate(cache.stored(), cache.stored_snapshots(), MEMORY)
        if self.tiers is not None:
            self._restate(self.tiers.stored_in_files(), self.tiers.snapshots_in_files(), FILES)
        self.flush()
        self._allowed_bytes = max(KEPT_BYTES, 2 * self._kept_bytes)
        return first

    def flush(self) -> None:
        """Number what was gathered, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._pending:
            return
        payload = encode_batch(EventBatch(time.time(), tuple(self._pending)))
        self._pending.clear()
        self._pending_tokens = self._pending_blocks = 0
        seq = self.next_seq
        self.next_seq += 1
        self._kept.append(payload)
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > self._allowed_bytes:
            self._kept_bytes -= len(self._kept.popleft())
        for told in self.on_batch:
            told(seq, payload)

    def _add(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            self._pending.append(event)
            if isinstance(event, BlockStored):
                self._pending_tokens += len(event.token_ids)
            if not isinstance(event, AllBlocksCleared):
                self._pending_blocks += len(event.block_hashes)
            if self._pending_tokens >= BATCH_TOKENS or self._pending_blocks >= BATCH_BLOCKS:
                self.flush()
        if self._pending and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.flush)

    def _restate(self, blocks: Iterable[StoredBlock], snapshots: Iterable[tuple[bytes, Quality]], medium: str) -> None:
        self._add(_runs(blocks, self._block_tokens, medium))
        exact = (name for name, quality in snapshots if quality is Quality.EXACT)
        self._add(self._snapshot_event(name, medium) for name in exact)

    def _snapshot_event(self, name: bytes, medium: str) -> BlockStored:
        return BlockStored(
            (name,),
            None,
            (),
            self._block_tokens,
            None,
            medium,
            None,
            group_idx=SNAPSHOT_GROUP,
            kv_cache_spec_kind=self._snapshot_kind,
        )


def _runs(blocks: Iterable[StoredBlock], block_tokens: int, medium: str) -> Iterator[BlockStored]:
    """The exact ones of these blocks, as few events as their chains and the size of a batch allow."""
    run: list[StoredBlock] = []
    for block in blocks:
        if block.quality is not Quality.EXACT:
            continue
        if run and (block.parent != run[-1].hash or len(run) * block_tokens >= BATCH_TOKENS):
            yield _event(run, block_tokens, medium)
            run = []
        run.append(block)
    if run:
        yield _event(run, block_tokens, medium)


def _event(run: list[StoredBlock], block_tokens: int, medium: str) -> BlockStored:
    """As vLLM tells it: the LoRA among the extras of every block, the salt among those of a prompt's first."""
    first = run[0]
    always = [first.lora] if first.lora else []
    begin = [*always, first.salt] if first.salt and first.parent is None else always
    extras = encode_extras([begin] + [always] * (len(run) - 1)) if begin else NO_EXTRAS
    return BlockStored(
        tuple(block.hash for block in run),
        first.parent,
        tuple(token for block in run for token in block.token_ids),
        block_tokens,
        None,
        medium,
        first.lora or None,
        extras,
        FULL_GROUP,
        FULL_KIND,
    )
