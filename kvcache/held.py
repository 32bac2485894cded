"""What events say is held, under our names of blocks, and the events of our own nodes, which use them already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvcache.hashing import HASH_BYTES
from kvcache.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent


class HeldSink(Protocol):
    """What a source holds, under our names. ``hashes`` of ``stored`` follow on each other, and the first on ``parent``.

    ``snapshot``: windows and states at the end of that block are held too, so that a prompt can be resumed there.
    """

    def stored(self, hashes: Sequence[bytes], parent: bytes | None) -> None:
        """These blocks are held."""

    def removed(self, hashes: Sequence[bytes]) -> None:
        """These blocks are not held any more."""

    def snapshot(self, hash: bytes) -> None:
        """A prompt can be resumed at the end of this block."""

    def removed_snapshot(self, hashes: Sequence[bytes]) -> None:
        """A prompt can't be resumed there any more."""

    def cleared(self) -> None:
        """Nothing is held any more."""


class OwnNames:
    """Events of our own nodes, whose names are ours already. ``unreadable`` counts blocks of another size."""

    def __init__(self, block_tokens: int, sink: HeldSink) -> None:
        self._block_tokens = block_tokens
        self._sink = sink
        self.unreadable = 0
        self.orphans = 0

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Tell the sink what these events say. A block's parent may come later, or never: names need none."""
        for event in events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    names = _names(event.block_hashes)
                    if event.group_idx:
                        self._sink.removed_snapshot(names)
                    else:
                        self._sink.removed(names)
                case AllBlocksCleared():
                    self._sink.cleared()

    def _stored(self, event: BlockStored) -> None:
        names, parents = _names(event.block_hashes), _names([event.parent_block_hash or b""])
        if event.group_idx:
            for name in names:
                self._sink.snapshot(name)
        elif (
            event.block_size != self._block_tokens
            or len(names) < len(event.block_hashes)
            or (event.parent_block_hash is not None and not parents)
        ):
            self.unreadable += len(event.block_hashes)
        else:
            self._sink.stored(names, parents[0] if parents else None)


def _names(hashes: Sequence[BlockHash]) -> list[bytes]:
    """Those that can be names of ours."""
    return [name for name in hashes if isinstance(name, bytes) and len(name) == HASH_BYTES]
