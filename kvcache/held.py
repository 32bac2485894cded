"""What events say is held, under our names of blocks, and the events of our own nodes, which use them already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvcache.hashing import HASH_BYTES
from kvcache.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent

FILES = "STORAGE"
MOST_IN_FILES = 1 << 20


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
    """Events of our own nodes, whose names are ours already. ``unreadable`` counts blocks of another size.

    A node tells each block on one medium, and a move as stored there and then removed here. Of both kinds ``in_files``
    are those that it would have to read first; beyond ``MOST_IN_FILES`` of them it is said to hold less than it does.
    """

    def __init__(
        self, block_tokens: int, sink: HeldSink, in_files: tuple[Iterable[bytes], Iterable[bytes]] = ((), ())
    ) -> None:
        """``in_files`` as another one had them."""
        self.in_files = (set(in_files[0]), set(in_files[1]))
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
                    self._removed(event)
                case AllBlocksCleared():
                    for names in self.in_files:
                        names.clear()
                    self._sink.cleared()

    def _removed(self, event: BlockRemoved) -> None:
        """What is not on that medium any more has moved, and was told where to."""
        names, in_files = _names(event.block_hashes), self.in_files[bool(event.group_idx)]
        if event.medium is not None:
            names = [name for name in names if (name in in_files) is (event.medium == FILES)]
        in_files.difference_update(names)
        if event.group_idx:
            self._sink.removed_snapshot(names)
        else:
            self._sink.removed(names)

    def _stored(self, event: BlockStored) -> None:
        names, parents = _names(event.block_hashes), _names([event.parent_block_hash or b""])
        if event.group_idx:
            if self._place(names, event):
                for name in names:
                    self._sink.snapshot(name)
        elif (
            event.block_size != self._block_tokens
            or len(names) < len(event.block_hashes)
            or (event.parent_block_hash is not None and not parents)
        ):
            self.unreadable += len(event.block_hashes)
        elif self._place(names, event):
            self._sink.stored(names, parents[0] if parents else None)

    def _place(self, names: Sequence[bytes], event: BlockStored) -> bool:
        """Remember where these are; False where there are too many in files."""
        in_files = self.in_files[bool(event.group_idx)]
        if event.medium != FILES:
            in_files.difference_update(names)
        elif len(in_files) + len(names) > MOST_IN_FILES:
            return False
        else:
            in_files.update(names)
        return True


def _names(hashes: Sequence[BlockHash]) -> list[bytes]:
    """Those that can be names of ours."""
    return [name for name in hashes if isinstance(name, bytes) and len(name) == HASH_BYTES]
