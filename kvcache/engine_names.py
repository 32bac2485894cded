"""From an engine's names of its blocks to our own: what its events say is held, keyed on token ids by our chain.

Engine hashes mean nothing outside their engine, and its block size need not fit ours: a block of ours is held while
every engine block that covers a part of it is. The groups of one hybrid model are not separate prefixes: a block is
held when all groups of full attention hold it, and a prompt can be resumed at its end when all other groups have what
they need there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from kvcache.hashing import chain_root, more_hashes
from kvcache.held import HeldSink
from kvcache.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent, KvEventError
from kvcache.side_groups import EngineBlock, SideGroups, Written

MAX_BLOCKS = 1 << 20
MAX_ORPHANS = 1024

_FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


@dataclass(eq=False, slots=True)
class _Ours:
    """One of our blocks: the one before it, the engine blocks that cover it, and whether the sink holds it for held."""

    parent: bytes | None
    cover: tuple[BlockHash, ...]
    said: bool = False


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    """All that an ``EngineNames`` knows, as it is written: blocks with parents first, and groups beside full ones."""

    full: list[int]
    blocks: list[
        tuple[
            BlockHash,
            BlockHash | None,
            int,
            bytes,
            bytes | None,
            tuple[int, ...],
            tuple[bytes, ...],
            list[tuple[int, str]],
        ]
    ]
    groups: Written


_kept_decoder = msgspec.msgpack.Decoder(_Kept)


class EngineNames:
    """Events of one engine (of one of its data-parallel ranks) with any block size and any hashes.

    ``orphans`` counts blocks whose parent was not known when they came; a bounded number waits for it. ``unreadable``
    counts blocks that have no name of ours, such as those of images, and those beyond ``max_blocks``.
    """

    def __init__(self, block_tokens: int, fingerprint: str, sink: HeldSink, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_tokens = block_tokens
        self._fingerprint = fingerprint
        self._sink = sink
        self._max_blocks = max_blocks
        self.unreadable = 0
        self.orphans = 0
        self._forget()

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Tell the sink what the events of one batch say."""
        touched: dict[BlockHash, None] = {}
        for event in events:
            match event:
                case BlockStored():
                    self._stored(event, touched)
                case BlockRemoved():
                    self._removed(event)
                case AllBlocksCleared():
                    self._forget()
                    touched.clear()
                    self._sink.cleared()
        self._side.find(touched)

    def dump(self) -> bytes:
        """What is known, for ``load``; what waits for a parent is left out."""
        blocks = [
            (name, b.parent, b.size, b.root, b.last, b.tail, b.ours, sorted(b.places))
            for name, b in self._blocks.items()
        ]
        return msgspec.msgpack.encode(_Kept(sorted(self._full), blocks, self._side.dump()))

    def load(self, data: bytes) -> None:
        """Know what another one knew, and tell the sink, which must be empty. Raises KvEventError."""
        try:
            kept = _kept_decoder.decode(data)
            self._forget()
            self._full.update(kept.full)
            for name, parent, size, root, last, tail, ours, places in kept.blocks:
                self._place(name, EngineBlock(parent, size, root, last, tail, ours, set(places)))
            self._side.load(kept.groups)
        except (msgspec.MsgspecError, RecursionError, KeyError) as error:
            self._forget()
            raise KvEventError(f"names of an engine's blocks: {error!r}") from error
        self._judge(list(self._blocks))
        self._side.find(list(self._blocks))

    def _forget(self) -> None:
        self._blocks: dict[BlockHash, EngineBlock] = {}
        self._ours: dict[bytes, _Ours] = {}
        self._full: set[int] = set()
        self._side = SideGroups(self._blocks, self._sink, self._max_blocks)
        self._orphans: OrderedDict[BlockHash, list[BlockStored]] = OrderedDict()
        self._orphan_events = 0

    # ---- stored

    def _stored(self, event: BlockStored, touched: dict[BlockHash, None]) -> None:
        group, kind = event.group_idx or 0, event.kv_cache_spec_kind
        if kind not in _FULL and (kind is not None or group):
            touched.update(dict.fromkeys(event.block_hashes))
            self._side.stored(event, group, kind)
            return
        if group not in self._full:
            self._full.add(group)
            self._judge(list(self._blocks))
        if not event.token_ids:  # vLLM of blocks that are now on another medium too
            self._hold([name for name in event.block_hashes if name in self._blocks], event)
            return
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            self.unreadable += len(event.block_hashes)
            return
        parent = event.parent_block_hash
        if parent is not None and parent not in self._blocks:
            self._adopt_later(parent, event)
            return
        runs = [event]
        while runs:
            run = runs.pop()
            names = self._add(run)
            touched.update(dict.fromkeys(names))
            self._hold(names, run)
            for name in names:
                waiting = self._orphans.pop(name, [])
                self._orphan_events -= len(waiting)
                runs += waiting

    def _add(self, event: BlockStored) -> tuple[BlockHash, ...]:
        """Take in a run whose parent is known; the names of those of its blocks that have names of ours."""
        root, plain = self._root(event)
        names = event.block_hashes[: min(plain, max(0, self._max_blocks - len(self._blocks)))]
        self.unreadable += len(event.block_hashes) - len(names)
        parent = event.parent_block_hash
        last: bytes | None = None
        tail: tuple[int, ...] = ()
        if parent is not None:
            before = self._blocks[parent]
            root, last, tail = before.root, before.last, before.tail
        for at, name in enumerate(names):
            ids = (*tail, *event.token_ids[at * event.block_size : (at + 1) * event.block_size])
            ours = tuple(more_hashes(last or root, ids, self._block_tokens))
            last, tail = (ours[-1] if ours else last), ids[len(ours) * self._block_tokens :]
            if name not in self._blocks:
                self._place(name, EngineBlock(parent, event.block_size, root, last, tail, ours))
            parent = name
        return names

    def _place(self, name: BlockHash, block: EngineBlock) -> None:
        """Put a new block behind its parent, and say which engine blocks cover those of ours that end in it."""
        self._blocks[name] = block
        last, reach = None, 0
        if block.parent is not None:
            before = self._blocks[block.parent]
            before.children += 1
            last, reach = before.last, len(before.tail)
        for mine in block.ours:
            if mine not in self._ours:
                self._ours[mine] = _Ours(last, self._cover(name, mine, reach))
            last, reach = mine, 0

    def _root(self, event: BlockStored) -> tuple[bytes, int]:
        """The key of a chain that begins with this event, and how many of its blocks are of nothing but tokens.

        vLLM has the salt among the extras of a prompt's first block, and the LoRA's name among those of every block.
        """
        lora = event.lora_name or ("" if event.lora_id in (None, 0) else f"#{event.lora_id}")
        salt, plain = event.cache_salt or "", len(event.block_hashes)
        try:
            extras = event.extras()
        except KvEventError:
            return b"", 0
        for at, parts in enumerate(extras[:plain]):
            rest = [part for part in parts if part != event.lora_name]
            if at == 0 and event.parent_block_hash is None and len(rest) == 1 and rest[0] is not None:
                salt = rest[0]
            elif rest:
                plain = at
                break
        return chain_root(self._fingerprint, salt=salt, lora=lora), plain

    def _cover(self, name: BlockHash, mine: bytes, reach: int) -> tuple[BlockHash, ...]:
        """The engine blocks that cover ``mine``, which ends in ``name`` and begins ``reach`` tokens before that one."""
        cover, at = [name], self._blocks[name].parent
        while reach > 0 and at is not None:
            cover.append(at)
            earlier = self._blocks[at]
            earlier.later.add(mine)
            at, reach = earlier.parent, reach - earlier.size
        return tuple(cover)

    def _hold(self, names: Iterable[BlockHash], event: BlockStored) -> None:
        names = list(names)
        for name in names:
            self._blocks[name].places.add((event.group_idx or 0, event.medium or ""))
        self._judge(names)

    def _adopt_later(self, parent: BlockHash, event: BlockStored) -> None:
        self.orphans += len(event.block_hashes)
        self._orphans.setdefault(parent, []).append(event)
        self._orphan_events += 1
        while self._orphan_events > MAX_ORPHANS:
            self._orphan_events -= len(self._orphans.popitem(last=False)[1])

    # ---- removed

    def _removed(self, event: BlockRemoved) -> None:
        if (event.group_idx or 0) in self._side:
            self._side.removed(event, event.group_idx or 0)
            return
        names = [name for name in event.block_hashes if name in self._blocks]
        for name in names:
            places = self._blocks[name].places
            places.difference_update([place for place in places if _says_of(event, *place)])
        self._judge(names)
        for name in names:
            self._let_go(name)

    def _let_go(self, name: BlockHash | None) -> None:
        """Forget a block that is gone, and those before it that had only stayed for it, to say what covers ours."""
        while name is not None and (block := self._blocks.get(name)) is not None:
            if block.places or block.children:
                return
            del self._blocks[name]
            for mine in block.ours:
                if mine in self._ours and self._ours[mine].cover[0] == name:
                    for at in self._ours.pop(mine).cover[1:]:
                        self._blocks[at].later.discard(mine)
            name = block.parent
            if name is not None:
                self._blocks[name].children -= 1

    # ---- what of ours is whole

    def _judge(self, names: Iterable[BlockHash]) -> None:
        """Tell the sink which blocks of ours have become whole with these engine blocks, and which no longer are."""
        whole: list[bytes] = []
        gone: list[bytes] = []
        for name in names:
            for mine in (*self._blocks[name].ours, *self._blocks[name].later):
                ours = self._ours.get(mine)
                if ours is None or ours.said == all(self._everywhere(at) for at in ours.cover):
                    continue
                ours.said = not ours.said
                (whole if ours.said else gone).append(mine)
        if gone:
            self._sink.removed(gone)
        begin = 0
        for at in range(1, len(whole) + 1):
            if at == len(whole) or self._ours[whole[at]].parent != whole[at - 1]:
                self._sink.stored(whole[begin:at], self._ours[whole[begin]].parent)
                begin = at

    def _everywhere(self, name: BlockHash) -> bool:
        """Whether every group of full attention holds an engine block, on whatever medium."""
        places = self._blocks[name].places
        return bool(places) and (len(self._full) == 1 or self._full <= {group for group, _ in places})


def _says_of(event: BlockRemoved, group: int, medium: str) -> bool:
    """Whether a removal concerns a block in that group and on that medium; what is not said means any."""
    return event.group_idx in (None, group) and (event.medium is None or medium in ("", event.medium))
