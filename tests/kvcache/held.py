"""A sink of events that keeps what is held as plain sets, and checks what it is told."""

from __future__ import annotations

from collections.abc import Sequence


class HeldSets:
    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes | None] = {}
        self.snapshots: set[bytes] = set()

    def stored(self, hashes: Sequence[bytes], parent: bytes | None) -> None:
        assert hashes
        for name in hashes:
            assert name not in self.blocks, "told twice"
            self.blocks[name], parent = parent, name

    def removed(self, hashes: Sequence[bytes]) -> None:
        for name in hashes:
            del self.blocks[name]

    def snapshot(self, hash: bytes) -> None:
        assert hash not in self.snapshots, "told twice"
        self.snapshots.add(hash)

    def removed_snapshot(self, hashes: Sequence[bytes]) -> None:
        self.snapshots.difference_update(hashes)

    def cleared(self) -> None:
        self.blocks.clear()
        self.snapshots.clear()
