"""The groups of a hybrid engine that are not of full attention: they decide where a prompt can be resumed.

Of such a group only the names count: vLLM gives a block one name in all groups, whatever tokens it tells with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcache.held import HeldSink
from kvcache.kv_events import BlockHash, BlockRemoved, BlockStored

_WINDOWS = frozenset({"sliding_window", "sliding_window_mla"})

Written = list[tuple[int, int, bool, list[tuple[BlockHash, list[str]]]]]


@dataclass(eq=False, slots=True)
class EngineBlock:
    """One engine block. ``places`` are the (group, medium) that hold it; none: it is gone, but ``children`` are not.

    ``last`` names our last full block up to its end, None where there is none, and then a chain would begin with
    ``root``; ``tail`` is the tokens since. ``ours`` are those of our blocks that end in it, ``later`` those that begin
    in it and end in a block after it.
    """

    parent: BlockHash | None
    size: int
    root: bytes
    last: bytes | None
    tail: tuple[int, ...]
    ours: tuple[bytes, ...]
    places: set[tuple[int, str]] = field(default_factory=set)
    later: set[bytes] = field(default_factory=set)
    children: int = 0


@dataclass(eq=False, slots=True)
class _Group:
    """To resume, it needs ``window`` tokens back; 0: the last block alone. Of a kind not known here it is no use."""

    window: int
    usable: bool
    places: dict[BlockHash, set[str]] = field(default_factory=dict)


class SideGroups:
    """All of them of one engine, whose ``blocks`` of full attention say what follows on what."""

    def __init__(self, blocks: Mapping[BlockHash, EngineBlock], sink: HeldSink, max_blocks: int) -> None:
        self._blocks = blocks
        self._sink = sink
        self._max_blocks = max_blocks
        self._groups: dict[int, _Group] = {}
        self._snapshots: set[bytes] = set()
        self._needed_by: dict[tuple[int, BlockHash], set[bytes]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._groups

    def dump(self) -> Written:
        """What each holds, for ``load``."""
        return [
            (number, group.window, group.usable, [(name, sorted(media)) for name, media in group.places.items()])
            for number, group in self._groups.items()
        ]

    def load(self, written: Written) -> None:
        """Hold what others held; ``find`` tells the sink."""
        for number, window, usable, names in written:
            self._groups[number] = _Group(window, usable, {name: set(media) for name, media in names})

    def stored(self, event: BlockStored, number: int, kind: str | None) -> None:
        """A group holds blocks; one that was not known so far makes all that was said of resuming uncertain."""
        group = self._groups.get(number)
        if group is None:
            window = (event.kv_cache_spec_sliding_window or 0) if kind in _WINDOWS else 0
            group = self._groups[number] = _Group(window, usable=kind == "mamba" or window > 0)
            self._withdraw(self._snapshots)
        for name in event.block_hashes:
            if name in group.places or len(group.places) < self._max_blocks:
                group.places.setdefault(name, set()).add(event.medium or "")

    def removed(self, event: BlockRemoved, number: int) -> None:
        """A group that is known no longer holds blocks on that medium."""
        places = self._groups[number].places
        for name in event.block_hashes:
            held = places.get(name)
            if held is None:
                continue
            held.difference_update((event.medium, "") if event.medium is not None else tuple(held))
            if not held:
                del places[name]
                self._withdraw(self._needed_by.pop((number, name), set()))

    def find(self, names: Iterable[BlockHash]) -> None:
        """Tell the sink at which of these blocks' ends every group has what it needs."""
        if not self._groups or not all(group.usable for group in self._groups.values()):
            return
        for name in names:
            block = self._blocks.get(name)
            if block is None or block.tail or block.last is None or block.last in self._snapshots:
                continue
            needs = [(number, at) for number, group in self._groups.items() for at in self._needs(group, name, block)]
            if all(at in self._groups[number].places for number, at in needs):
                self._snapshots.add(block.last)
                for need in needs:
                    self._needed_by.setdefault(need, set()).add(block.last)
                self._sink.snapshot(block.last)

    def _needs(self, group: _Group, name: BlockHash, block: EngineBlock) -> Sequence[BlockHash]:
        """The blocks that a group must hold for a prompt to be resumed at the end of ``name``."""
        needs, left, at = [name], group.window - 1 - block.size, block.parent
        while left > 0 and at is not None:
            needs.append(at)
            earlier = self._blocks[at]
            at, left = earlier.parent, left - earlier.size
        return needs

    def _withdraw(self, snapshots: set[bytes]) -> None:
        gone = sorted(snapshots & self._snapshots)
        self._snapshots.difference_update(gone)
        if gone:
            self._sink.removed_snapshot(gone)
