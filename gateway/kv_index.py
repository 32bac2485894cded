"""The one owner of the prefix index in this process: what nodes and engines say they hold goes in, matches come out.

Each source of events (a node's control stream, or one publisher of an engine) has its place in its numbering and its
own names. A gap is asked for again; what cannot be had any more empties what is known of that source, and it is learnt
anew. A new incarnation drops what was known of the old one.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import xxhash

from gateway.kv_lookup import Held
from gateway.kv_source import EngineSnapshot, Figures, Snapshot, Source, WorkerSink
from gateway.sessions import NodeLost, NodeSession
from kvcache.blocks import BLOCK_TOKENS
from kvcache.control import KvEvents, ReplayKvEvents
from kvcache.engine_names import EngineNames
from kvcache.held import OwnNames
from kvcache.kv_events import AllBlocksCleared, EventBatch, KvEventError, decode_batch
from kvcache.layout import GroupKind, KVLayout
from scheduler import index_snapshot
from scheduler.event_sequence import EventSequence
from scheduler.prefix_index import Match, PrefixIndex

log = logging.getLogger(__name__)

KEEP_LOST_S = 60.0
MAX_SEQ = 1 << 62
RECENT_BATCHES = 4096
_RANK = "#"


class KvIndex:
    """All methods run on the event loop and return at once. Times are seconds of the loop's clock."""

    def __init__(self, layout: KVLayout, fingerprint: str) -> None:
        self.index = PrefixIndex(snapshots=any(group.kind is not GroupKind.FULL for group in layout.groups))
        self.figures = Figures()
        self.trusted = True
        self._fingerprint = fingerprint
        self._key = f"{fingerprint}/{BLOCK_TOKENS}"
        self._nodes: dict[str, Source] = {}
        self._engines: dict[str, Source] = {}

    def close(self) -> None:
        """Let go of the memory of what is known; nothing is asked afterwards.

        Others may keep the gateway that it belongs to: the web framework remembers the functions behind its routes.
        """
        self._nodes.clear()
        self._engines.clear()
        self.index = PrefixIndex(1, snapshots=self.index.snapshots)

    @property
    def nbytes(self) -> int:
        """About what the index takes."""
        return self.index.tree.runs.nbytes

    # ---- routing

    def matches(self, names: Sequence[bytes], now: float) -> Mapping[str, Held]:
        """What each node holds of a prompt; of several ranks of one node the one that can resume latest."""
        if not self.trusted or not names:
            return {}
        self.index.expire(now)
        found: dict[str, Held] = {}
        for worker, match in self.index.match(names).items():
            node, _, rank = worker.partition(_RANK)
            in_files, end_in_files = self._in_files(worker, names, match)
            held = Held(
                match.held_blocks * BLOCK_TOKENS,
                match.resumable_blocks * BLOCK_TOKENS,
                worker in self.index.reporting,
                int(rank) if rank else None,
                in_files,
                end_in_files,
            )
            if node not in found or (held.resumable, held.held) > (found[node].resumable, found[node].held):
                found[node] = held
        self.figures.lookups += 1
        self.figures.hits += bool(found)
        self.figures.asked_tokens += len(names) * BLOCK_TOKENS
        self.figures.matched_tokens += max((held.held for held in found.values()), default=0)
        return found

    def _in_files(self, worker: str, names: Sequence[bytes], match: Match) -> tuple[int, bool]:
        """Tokens of the held blocks that a node of ours would read from files, and whether what resumes there is one.

        ``names`` are those of the whole prompt.
        """
        source = self._nodes.get(worker)
        if source is None or not isinstance(source.names, OwnNames) or not any(source.names.in_files):
            return 0, False
        blocks, snapshots = source.names.in_files
        end = match.resumable_blocks
        count = sum(map(blocks.__contains__, names[: match.held_blocks]))
        return count * BLOCK_TOKENS, bool(end) and names[end - 1] in snapshots

    def sent(self, node_id: str, names: Sequence[bytes], now: float) -> None:
        """A prompt went to a node; ignored for one that sends events."""
        self.index.sent(node_id, names, now)

    def distrust(self) -> None:
        """Say from now on that nobody holds anything: an engine counts other tokens than the gateway."""
        if self.trusted:
            log.warning("prefix affinity is off: an engine's count of prompt tokens differs from the gateway's")
        self.trusted = False

    def workers(self) -> dict[str, dict[str, int]]:
        """Each source of events by its name in the index: how far it is, and blocks that it could not place."""
        return {
            source.worker: {
                "applied_seq": source.sequence.applied,
                "orphans": source.names.orphans,
                "unreadable": source.names.unreadable,
            }
            for source in (*self._nodes.values(), *self._engines.values())
        }

    # ---- over a restart

    def dump(self, now: float) -> Snapshot:
        """What is known, and up to which batch of each source."""
        own = {source.worker: source for source in self._nodes.values()}
        sequences = {worker: source.sequence.applied for worker, source in own.items()}
        kept = index_snapshot.dump(self.index, sequences, key=self._key, now=now)
        engines = {
            publisher: EngineSnapshot(source.worker, applied, source.recent[applied], source.names.dump())
            for publisher, source in self._engines.items()
            if isinstance(source.names, EngineNames) and (applied := source.sequence.applied) in source.recent
        }
        in_files = {
            worker: (list(source.names.in_files[0]), list(source.names.in_files[1]))
            for worker, source in own.items()
            if isinstance(source.names, OwnNames) and any(source.names.in_files)
        }
        return Snapshot({worker: source.incarnation for worker, source in own.items()}, kept, engines, in_files)

    def restore(self, snapshot: Snapshot, now: float) -> None:
        """Into a fresh index. Nodes that do not come back soon are forgotten. Raises SnapshotError."""
        sequences = index_snapshot.restore(snapshot.index, self.index, key=self._key, now=now)
        for worker in list(self.index.reporting):
            incarnation = snapshot.incarnations.get(worker)
            if incarnation is None or worker not in sequences:
                self.index.forget(worker)
                continue
            in_files = snapshot.in_files.get(worker, ((), ()))
            names = OwnNames(BLOCK_TOKENS, WorkerSink(self.index, worker), in_files)
            sequence = EventSequence[EventBatch](sequences[worker])
            self._nodes[worker] = Source(worker, incarnation, names, sequence, lost_at=now)
        for publisher, kept in snapshot.engines.items():
            self._restore_engine(publisher, kept)

    def _restore_engine(self, publisher: str, kept: EngineSnapshot) -> None:
        names = EngineNames(BLOCK_TOKENS, self._fingerprint, WorkerSink(self.index, kept.worker))
        self.index.cleared(kept.worker)
        try:
            names.load(kept.names)
        except KvEventError as error:
            log.warning("kv events of %s are learnt anew: %s", publisher, error)
            return
        sequence = EventSequence[EventBatch](kept.applied)
        source = Source(kept.worker, "", names, sequence, recent=OrderedDict({kept.applied: kept.digest}))
        self._engines[publisher] = source

    # ---- our own nodes, over their control streams

    def joined(self, session: NodeSession) -> None:
        """A node has joined: ask it for what is not known yet, and drop what another incarnation said."""
        source = self._nodes.get(session.node_id)
        if source is not None and source.incarnation != session.incarnation:
            self._forget_node(session.node_id)
            source = None
        if not session.join.kv_events:
            if not any(one.worker.partition(_RANK)[0] == session.node_id for one in self._engines.values()):
                self.index.forget(session.node_id)
            return
        if source is None:
            worker = session.node_id
            names = OwnNames(BLOCK_TOKENS, WorkerSink(self.index, worker))
            source = self._nodes[worker] = Source(worker, session.incarnation, names)
            self.index.cleared(worker)
        source.session, source.lost_at = session, None
        source.sequence = EventSequence(source.sequence.applied)
        self._ask(session, source)

    def heard(self, session: NodeSession, message: KvEvents) -> None:
        """A node's events. What cannot be read, or can't be had again, empties what is known of it."""
        source = self._nodes.get(session.node_id)
        if source is None or source.session is not session:
            return
        if not 0 <= message.seq <= MAX_SEQ:
            self.figures.errors += 1
            return
        if self._offer(source, message.seq, message.payload, live=True):
            source.asked = False
        if source.sequence.overflowed:
            self._rebuild(source)
        if source.sequence.missing is not None and not source.asked:
            self.figures.gaps += 1
            self._ask(session, source)

    def lost(self, session: NodeSession, now: float) -> None:
        """A node's stream ended. It may come back; until then nothing is sent to it, so that it does no harm."""
        source = self._nodes.get(session.node_id)
        if source is not None and source.session is session:
            source.session, source.lost_at = None, now

    def sweep(self, now: float) -> None:
        """Forget nodes that have been gone for a minute, and do a little of the index's upkeep."""
        gone = [n for n, s in self._nodes.items() if s.lost_at is not None and now - s.lost_at >= KEEP_LOST_S]
        for node_id in gone:
            self._forget_node(node_id)
        self.index.expire(now)
        self.index.tidy()

    def _ask(self, session: NodeSession, source: Source) -> None:
        source.asked = True
        self.figures.replays += 1
        try:
            session.send(ReplayKvEvents(source.sequence.applied + 1))
        except NodeLost:
            log.debug("no replay: node lost node=%s", session.node_id)

    def _forget_node(self, node_id: str) -> None:
        del self._nodes[node_id]
        self.index.forget(node_id)

    # ---- engines, over their publishers

    def engine(self, publisher: str, node_id: str) -> Source:
        """The source of one publisher of a node's engine; its rank in the node shows with its first batch."""
        source = self._engines.get(publisher)
        if source is None:
            names = EngineNames(BLOCK_TOKENS, self._fingerprint, WorkerSink(self.index, node_id))
            source = self._engines[publisher] = Source(node_id, "", names)
            self.index.cleared(node_id)
        return source

    def engine_said(self, source: Source, seq: int, payload: bytes, *, live: bool) -> None:
        """A batch of an engine, published now or replayed. One that counts anew has started anew."""
        if seq <= source.sequence.applied:
            anew = live and not self.engine_knows(source, seq, payload)
        else:
            anew = live and source.sequence.went_back(seq)
        if anew:
            self.engine_restarted(source)
        source.recent[seq] = xxhash.xxh3_64_intdigest(payload)
        if len(source.recent) > RECENT_BATCHES:
            source.recent.popitem(last=False)
        self._offer(source, seq, payload, live=live)
        if source.sequence.overflowed:
            self._rebuild(source)

    def engine_knows(self, source: Source, seq: int, payload: bytes) -> bool:
        """Whether this is a batch that was applied."""
        return seq <= source.sequence.applied and source.recent.get(seq) == xxhash.xxh3_64_intdigest(payload)

    def engine_restarted(self, source: Source) -> None:
        """What an engine held is gone with its process."""
        log.info("engine started anew worker=%s", source.worker)
        source.names.apply([AllBlocksCleared()])
        source.sequence = EventSequence()
        source.recent.clear()

    def engine_gave_all(self, source: Source) -> None:
        """A replay has ended, or there is none to be had: if something is missing still, it will not come."""
        if source.sequence.missing is not None:
            self._rebuild(source)

    # ---- both

    def _offer(self, source: Source, seq: int, payload: bytes, *, live: bool) -> bool:
        """Apply what this batch allows; whether that was anything."""
        try:
            batch = decode_batch(payload)
        except KvEventError as error:
            self.figures.errors += 1
            log.warning("kv events not readable worker=%s seq=%d: %s", source.worker, seq, error)
            batch = EventBatch(time.time(), (AllBlocksCleared(),))  # what it took away is not known
        resets = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        ready = source.sequence.offer(seq, batch, nbytes=len(payload), live=live, resets=resets)
        self._apply(source, ready)
        return bool(ready)

    def _apply(self, source: Source, batches: Sequence[EventBatch]) -> None:
        for batch in batches:
            if batch.data_parallel_rank and isinstance(source.names, EngineNames) and _RANK not in source.worker:
                self._move_to_rank(source, batch.data_parallel_rank)
            source.names.apply(batch.events)
            self.figures.batches += 1
            self.figures.events += len(batch.events)
            self.figures.lag_s = max(0.0, time.time() - batch.ts)

    def _move_to_rank(self, source: Source, rank: int) -> None:
        """A cache lies on one rank of its node, which has a name of its own in the index."""
        source.worker = f"{source.worker}{_RANK}{rank}"
        source.names = EngineNames(BLOCK_TOKENS, self._fingerprint, WorkerSink(self.index, source.worker))

    def _rebuild(self, source: Source) -> None:
        self.figures.rebuilds += 1
        log.warning("kv events lost worker=%s after=%d", source.worker, source.sequence.applied)
        source.names.apply([AllBlocksCleared()])
        self._apply(source, source.sequence.give_up())
