"""Which node holds how much of a prompt's beginning. Updated by events, asked by names of blocks; no I/O, no clock.

Nodes that report what they store and remove are known exactly. Of the others only what was sent to them is remembered,
for a limited time. One index serves one model: the chain of names covers its fingerprint.

Everything it says is an estimate for routing. A node names its own blocks from the tokens that it is given: one that
turns out to hold less computes more, or says so; it never uses blocks of another prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from scheduler import coverage
from scheduler.prefix_runs import Run
from scheduler.prefix_tree import PrefixTree

DEFAULT_CAPACITY_BLOCKS = 4_000_000
DEFAULT_HISTORY_S = 600.0
SPANS = 4


class Match(msgspec.Struct, frozen=True, gc=False):
    """How many leading blocks of a prompt a node holds, and after how many of them it can resume a prefill."""

    held_blocks: int
    resumable_blocks: int


class Span(msgspec.Struct):
    """What was sent to nodes without events in a quarter of the history: when it began, and a holder for each node."""

    since: float
    holders: dict[str, int]


class PrefixIndex:
    """Longest match per node. ``snapshots`` is False for models whose full-attention blocks are all there is to resume.

    Bounded by ``capacity_blocks``: beyond it the ends of prompts go that nothing stored to or matched of late (see
    ``Runs``), and a node is said to hold less than it does. What was sent to a node without events is remembered for
    ``history_s`` seconds, and forgotten at most a quarter of that before. Times are seconds of any one clock.
    """

    def __init__(
        self,
        capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS,
        *,
        snapshots: bool,
        history_s: float = DEFAULT_HISTORY_S,
    ) -> None:
        """Raises ValueError for a capacity below 1 and for a history of no length."""
        if not history_s > 0:
            raise ValueError(f"history_s must be above 0, got {history_s}")
        self.snapshots = snapshots
        self.history_s = history_s
        self.tree = PrefixTree(capacity_blocks)
        self.reporting: dict[str, int | None] = {}  # nodes with events, and their holder in the tree, if they have any
        self.spans: deque[Span] = deque()
        self.owners: dict[int, str] = {}  # of all holders that count
        self._last_holder = 0

    def __len__(self) -> int:
        """How many distinct blocks are kept."""
        return len(self.tree.table)

    # -- asking

    def match(self, names: Sequence[bytes]) -> dict[str, Match]:
        """What each node holds of the prompt whose blocks are called ``names``; only nodes that hold something.

        Raises ValueError for a name that is not 16 bytes long.
        """
        path = self.tree.path(names)
        if not path:
            return {}
        found: dict[str, Match] = {}
        snapshots = _snapshots(path) if self.snapshots else []
        for holder, held in _held(path).items():
            node = self.owners.get(holder)
            if node is None:
                continue
            resumable = _resumable(snapshots, holder, held) if self.snapshots else held
            if (other := found.get(node)) is not None:  # in several spans
                held, resumable = max(held, other.held_blocks), max(resumable, other.resumable_blocks)
            found[node] = Match(held, resumable)
        return found

    # -- events

    def stored(self, node: str, names: Sequence[bytes], parent: bytes | None) -> None:
        """``node`` has stored blocks that follow each other and ``parent``; None at the beginning of a prompt.

        Where ``parent`` is not known, they count as soon as it is. Raises ValueError for a name that is not 16 bytes
        long.
        """
        holder = self._reports(node)
        if holder is None:
            holder = self.reporting[node] = self.new_holder(node)
        if names:
            self.tree.store(holder, names, parent)

    def snapshot(self, node: str, name: bytes) -> None:
        """``node`` can resume after this block, which it must have stored before."""
        if (holder := self._reports(node)) is not None:
            self.tree.snapshot(holder, name)

    def removed(self, node: str, names: Sequence[bytes]) -> None:
        """``node`` has evicted these blocks; what follows them counts again when they come back."""
        if (holder := self._reports(node)) is not None:
            self.tree.remove(holder, names)

    def removed_snapshot(self, node: str, names: Sequence[bytes]) -> None:
        """``node`` can no longer resume after these blocks."""
        if (holder := self._reports(node)) is not None:
            self.tree.remove_snapshots(holder, names)

    def cleared(self, node: str) -> None:
        """``node`` has nothing any more, and will report what it gets."""
        if (holder := self._reports(node)) is not None:
            self._retire(holder)
            self.reporting[node] = None

    def forget(self, node: str) -> None:
        """``node`` is gone; should it come back, nothing is known of it, not even whether it reports."""
        if (holder := self.reporting.pop(node, None)) is not None:
            self._retire(holder)
        self._forget_sent(node)

    # -- routing history

    def sent(self, node: str, names: Sequence[bytes], now: float) -> None:
        """A prompt went to ``node``. Ignored for one that reports.

        It is taken to keep all of ``names`` and to be able to resume after the last. Raises ValueError for a name that
        is not 16 bytes long.
        """
        self.expire(now)
        if node in self.reporting or not names:
            return
        if not self.spans or now - self.spans[-1].since >= self.history_s / SPANS:
            self.spans.append(Span(now, {}))
        holders = self.spans[-1].holders
        if node not in holders:
            holders[node] = self.new_holder(node)
        kept = self.tree.store(holders[node], names, None)
        if kept and self.snapshots:
            self.tree.snapshot(holders[node], names[kept - 1])

    def expire(self, now: float) -> None:
        """Let go of what was sent too long ago. Costs nothing where there is none."""
        while self.spans and now - self.spans[0].since >= self.history_s:
            for holder in self.spans.popleft().holders.values():
                self._retire(holder)

    # -- upkeep

    def tidy(self, limit: int = 1000) -> bool:
        """Free what forgotten nodes took, at most ``limit`` steps of it; whether more is left.

        Every ``stored`` does a little of it, so this is for idle times.
        """
        return self.tree.runs.tidy(limit)

    def new_holder(self, node: str) -> int:
        """A number under which the tree knows ``node`` from now on."""
        self._last_holder += 1
        self.owners[self._last_holder] = node
        return self._last_holder

    def _reports(self, node: str) -> int | None:
        """The holder of a node of which an event came: from now on it is known exactly."""
        if node not in self.reporting:
            self._forget_sent(node)
            self.reporting[node] = None
        return self.reporting[node]

    def _forget_sent(self, node: str) -> None:
        for span in self.spans:
            if (holder := span.holders.pop(node, None)) is not None:
                self._retire(holder)

    def _retire(self, holder: int) -> None:
        del self.owners[holder]
        self.tree.runs.retired.add(holder)


def _held(path: Sequence[tuple[Run, int]]) -> dict[int, int]:
    """Leading blocks of the path that each holder has."""
    held: dict[int, int] = {}
    going = list(path[0][0].held)
    base = 0
    for run, upto in path:
        values, still = run.held, []
        for holder in going:
            value = values.get(holder, 0)
            blocks = value if value >= 0 else coverage.leading(value)
            if blocks >= upto:
                blocks = upto
                still.append(holder)
            if blocks:
                held[holder] = base + blocks
        if not still:
            break
        base, going = base + upto, still
    return held


def _snapshots(path: Sequence[tuple[Run, int]]) -> list[tuple[int, int, dict[int, int]]]:
    """Where on the path each run with snapshots begins and is left, and they, the last run first."""
    found, base = [], 0
    for run, upto in path:
        if run.snapshots:
            found.append((base, base + upto, run.snapshots))
        base += upto
    found.reverse()
    return found


def _resumable(snapshots: Sequence[tuple[int, int, dict[int, int]]], holder: int, held: int) -> int:
    """The last of ``holder``'s snapshots within its ``held`` leading blocks, or 0."""
    for base, end, values in snapshots:
        if base < held and (value := values.get(holder)):
            last = coverage.last_before(value, (held if held < end else end) - base)
            if last:
                return base + last
    return 0
