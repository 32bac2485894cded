"""A source of KV events as the index's owner keeps it: where it is in its numbering, and what it calls its blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.sessions import NodeSession
from kvcache.engine_names import EngineNames
from kvcache.held import OwnNames
from kvcache.kv_events import EventBatch
from scheduler.event_sequence import EventSequence
from scheduler.prefix_index import PrefixIndex


@dataclass(eq=False, slots=True)
class Source:
    """One numbered stream of events. ``worker`` is its name in the index; ``asked``: a replay is under way.

    ``session`` is the control stream that it comes by, None for one of an engine and for a node that is away.

    ``recent`` are digests of an engine's last batches by number: the same number with other bytes is another start.
    """

    worker: str
    incarnation: str
    names: OwnNames | EngineNames
    sequence: EventSequence[EventBatch] = field(default_factory=EventSequence)
    session: NodeSession | None = None
    asked: bool = False
    lost_at: float | None = None
    recent: OrderedDict[int, int] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class Figures:
    """Counters since the start. ``lag_s`` is how old the newest batch was when it was applied."""

    batches: int = 0
    events: int = 0
    gaps: int = 0
    replays: int = 0
    rebuilds: int = 0
    errors: int = 0
    lookups: int = 0
    hits: int = 0
    asked_tokens: int = 0
    matched_tokens: int = 0
    lag_s: float = 0.0


class EngineSnapshot(msgspec.Struct, frozen=True):
    """What was known of one publisher's blocks up to batch ``applied``, which had this digest."""

    worker: str
    applied: int
    digest: int
    names: bytes


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The index as bytes, of which incarnation of each node it speaks, and the names of engines by publisher.

    ``in_files`` are the blocks and snapshots of each node that it would have to read from files.
    """

    incarnations: dict[str, str]
    index: bytes
    engines: dict[str, EngineSnapshot]
    in_files: dict[str, tuple[list[bytes], list[bytes]]] = {}


class WorkerSink:
    """What one source holds, as the index knows it."""

    def __init__(self, index: PrefixIndex, worker: str) -> None:
        self._index = index
        self._worker = worker

    def stored(self, hashes: Sequence[bytes], parent: bytes | None) -> None:
        self._index.stored(self._worker, hashes, parent)

    def removed(self, hashes: Sequence[bytes]) -> None:
        self._index.removed(self._worker, hashes)

    def snapshot(self, hash: bytes) -> None:
        self._index.snapshot(self._worker, hash)

    def removed_snapshot(self, hashes: Sequence[bytes]) -> None:
        self._index.removed_snapshot(self._worker, hashes)

    def cleared(self) -> None:
        self._index.cleared(self._worker)
