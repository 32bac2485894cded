"""A prefix index as bytes and back, with the last event sequence of every node, so that a restart does not lose it.

After a restore the caller asks each node for the events after its sequence; a node that no longer has them reports all
that it holds. The bytes are: a magic with the version, BLAKE2b-128 of the rest, the length of the head, the head
(msgpack), and all blocks' names, run after run, parents before children.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b

import msgspec

from scheduler.block_table import NAME_BYTES
from scheduler.prefix_index import PrefixIndex, Span
from scheduler.prefix_runs import Run

MAGIC = b"prfaas-prefix-index-1\n"
_DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_BATCH_BLOCKS = 1 << 17
_SMALL = range(-(1 << 62), 1 << 62)

Packed = list[tuple[int, int | bytes]]


class SnapshotError(ValueError):
    """These bytes are not a whole snapshot of this index; nothing was restored."""


class _RunHead(msgspec.Struct, array_like=True, gc=False):
    blocks: int
    parent: int
    at: int
    above: bytes | None
    held: Packed
    snapshots: Packed


class _Head(msgspec.Struct, array_like=True, gc=False):
    key: str
    snapshots: bool
    sequences: dict[str, int]
    reporting: dict[str, int | None]
    spans: list[tuple[float, dict[str, int]]]
    runs: list[_RunHead]


def dump(index: PrefixIndex, sequences: Mapping[str, int], *, key: str, now: float) -> bytes:
    """All that the index knows. ``key`` says of what it is one: the model's fingerprint and the block size."""
    while index.tidy():
        pass
    numbers: dict[int, int] = {}
    heads: list[_RunHead] = []
    names: list[bytes] = []
    for run in _parents_first(index):
        parent = -1 if run.parent is None else numbers[run.parent.ident]
        numbers[run.ident] = len(heads)
        held, snapshots = _packed(run.held), _packed(run.snapshots or {})
        heads.append(_RunHead(len(run.slots), parent, run.at, run.above, held, snapshots))
        names.append(index.tree.table.names(run.slots))
    spans = [(now - span.since, span.holders) for span in index.spans]
    head = msgspec.msgpack.encode(_Head(key, index.snapshots, dict(sequences), index.reporting, spans, heads))
    parts = [len(head).to_bytes(_LENGTH_BYTES, "big"), head, *names]
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return b"".join([MAGIC, digest.digest(), *parts])


def restore(data: bytes, index: PrefixIndex, *, key: str, now: float) -> dict[str, int]:
    """Fill an empty index, and return the sequences. What does not fit into a smaller one is left out.

    Routing history goes on from the age that it had. Raises SnapshotError for bytes that are torn, of another version,
    key or kind of model, with the index as empty as it was.
    """
    assert not index.owners, "only an empty index can be restored into"
    head, names = _opened(data)
    if head.key != key:
        raise SnapshotError(f"key: the snapshot is of {head.key!r}, not of {key!r}")
    if head.snapshots != index.snapshots:
        raise SnapshotError(f"snapshots: {head.snapshots} in the snapshot, {index.snapshots} here")
    owners = {holder: node for node, holder in head.reporting.items() if holder is not None}
    for _, holders in head.spans:
        owners |= {holder: node for node, holder in holders.items()}
    fresh = {holder: index.new_holder(node) for holder, node in owners.items()}
    index.reporting.update({n: None if holder is None else fresh[holder] for n, holder in head.reporting.items()})
    index.spans.extend(Span(now - age, {n: fresh[holder] for n, holder in sent.items()}) for age, sent in head.spans)
    _Filling(index, fresh).fill(head.runs, names)
    return head.sequences


def _opened(data: bytes) -> tuple[_Head, memoryview]:
    """Head and names of a snapshot that is whole."""
    begin = len(MAGIC) + _DIGEST_BYTES
    if data[: len(MAGIC)] != MAGIC or len(data) < begin + _LENGTH_BYTES:
        raise SnapshotError("these bytes are no snapshot of a prefix index of this version")
    rest = memoryview(data)[begin:]
    if blake2b(rest, digest_size=_DIGEST_BYTES).digest() != data[len(MAGIC) : begin]:
        raise SnapshotError("the snapshot is torn: its digest does not match")
    length = int.from_bytes(rest[:_LENGTH_BYTES], "big")
    try:
        head = msgspec.msgpack.decode(rest[_LENGTH_BYTES : _LENGTH_BYTES + length], type=_Head)
    except msgspec.DecodeError as error:
        raise SnapshotError(f"the snapshot's head: {error}") from error
    return head, rest[_LENGTH_BYTES + length :]


def _parents_first(index: PrefixIndex) -> Iterator[Run]:
    done: set[int] = set()
    for run in index.tree.runs.all:
        above: list[Run] = []
        while run is not None and run.ident not in done:
            done.add(run.ident)
            above.append(run)
            run = run.parent
        yield from reversed(above)


class _Filling:
    """Puts runs back, many at a time."""

    def __init__(self, index: PrefixIndex, holders: Mapping[int, int]) -> None:
        self._runs = index.tree.runs
        self._holders = holders
        self._names = bytearray()
        self._empty: list[Run] = []
        self._blocks: list[int] = []

    def fill(self, heads: list[_RunHead], names: memoryview) -> None:
        placed: list[Run | None] = []
        first = 0
        for head in heads:
            piece, first = names[first : first + head.blocks * NAME_BYTES], first + head.blocks * NAME_BYTES
            parent = placed[head.parent] if head.parent >= 0 else None
            fits = self._runs.fits(len(self._names) // NAME_BYTES + head.blocks)
            if not fits or (parent is None and head.parent >= 0):
                placed.append(None)
                continue
            run = self._runs.begin(parent, head.at, head.above)
            placed.append(run)
            self._runs.cover(run, self._unpacked(head.held), self._unpacked(head.snapshots) or None)
            self._names += piece
            self._empty.append(run)
            self._blocks.append(head.blocks)
            if len(self._names) >= _BATCH_BLOCKS * NAME_BYTES:
                self._flush()
        self._flush()

    def _flush(self) -> None:
        if self._empty:
            self._runs.fill(self._empty, self._blocks, bytes(self._names))
        self._names.clear()
        self._empty, self._blocks = [], []

    def _unpacked(self, values: Packed) -> dict[int, int]:
        return {
            self._holders[holder]: value if isinstance(value, int) else int.from_bytes(value, "little", signed=True)
            for holder, value in values
        }


def _packed(values: Mapping[int, int]) -> Packed:
    return [
        (holder, value if value in _SMALL else value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        for holder, value in values.items()
    ]
