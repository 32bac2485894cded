"""A fleet of plain queues that obeys a controller: enough to close its loop, with nothing of transfers or caches.

One FIFO queue in front of the remote prefill nodes, one in front of the local ones, one in front of the decode slots.
A node that is to change finishes what it has, is away for ``conversion_s``, and serves again in its new stage.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.case_study import hybrid
from scheduler.controller.actions import Convert, LongTermController, SetThreshold
from scheduler.controller.ledger import Ledger
from scheduler.controller.observation import Kind, LocalNode, Observation, Stage
from scheduler.profiles import CASE_STUDY_KV, H20, H20_DECODE, H200

KIND = Kind("h20", H20, H20_DECODE)
STEP_S = 10.0


@dataclass(slots=True)
class Node:
    name: str
    stage: Stage
    running: int = 0
    becoming: Stage | None = None
    away: bool = False

    @property
    def serving(self) -> bool:
        return self.becoming is None


@dataclass(slots=True)
class Change:
    """When the serving split became what it is: (time, local nodes that serve in prefill, in decode)."""

    at: float
    prefill: int
    decode: int


@dataclass
class Fleet:
    """``next_request(now)`` gives the seconds to the next arrival, its uncached tokens and its output."""

    controller: LongTermController
    prefill: int
    decode: int
    threshold: float
    next_request: Callable[[float], tuple[float, int, int]]
    conversion_s: float = 30.0
    fails: bool = False
    conversions: list[tuple[float, Convert]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = itertools.count()
        self.nodes = [Node(f"n{next(count)}", Stage.PREFILL) for _ in range(self.prefill)]
        self.nodes += [Node(f"n{next(count)}", Stage.DECODE) for _ in range(self.decode)]
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._remote_free = 4
        self._remote: deque[tuple[int, int]] = deque()
        self._local: deque[tuple[int, int]] = deque()
        self._slots: deque[int] = deque()
        self._ledger = Ledger()
        self._speaking: dict[int, float] = {}
        self._lengths: list[int] = []
        self._failed: list[str] = []
        self._mark(0.0)

    def run(self, until: float) -> None:
        self._at(0.0, self._arrive)
        self._at(STEP_S, self._step)
        self.go_on(until)

    def go_on(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            now, _, event = heapq.heappop(self._heap)
            event(now)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), event))

    def _arrive(self, now: float) -> None:
        gap, tokens, output = self.next_request(now)
        self._lengths.append(tokens)
        (self._remote if tokens > self.threshold else self._local).append((tokens, output))
        self._feed(now)
        self._at(now + gap, self._arrive)

    def _feed(self, now: float) -> None:
        while self._remote and self._remote_free:
            tokens, output = self._remote.popleft()
            self._remote_free -= 1
            self._at(now + H200.seconds(float(tokens)), lambda at, output=output: self._remote_done(at, output))
        for node in self.nodes:
            if self._local and node.serving and node.stage is Stage.PREFILL and not node.running:
                tokens, output = self._local.popleft()
                node.running = 1
                self._at(
                    now + H20.seconds(float(tokens)), lambda at, node=node, output=output: self._done(at, node, output)
                )
        while self._slots:
            free = [n for n in self.nodes if n.serving and n.stage is Stage.DECODE and n.running < H20_DECODE.batch]
            if not free:
                break
            node, output = min(free, key=lambda n: n.running), self._slots.popleft()
            node.running += 1
            answer = next(self._order)
            self._speaking[answer] = now
            self._at(
                now + output * H20_DECODE.step_s,
                lambda at, node=node, answer=answer: self._spoken(at, node, answer),
            )

    def _remote_done(self, now: float, output: int) -> None:
        self._remote_free += 1
        self._slots.append(output)
        self._feed(now)

    def _done(self, now: float, node: Node, output: int) -> None:
        node.running = 0
        self._slots.append(output)
        self._drained(now, node)
        self._feed(now)

    def _spoken(self, now: float, node: Node, answer: int) -> None:
        self._count(now, answer)
        del self._speaking[answer]
        self._ledger.ended(answer)
        node.running -= 1
        self._drained(now, node)
        self._feed(now)

    def _count(self, now: float, answer: int) -> None:
        spoken = round((now - self._speaking[answer]) / H20_DECODE.step_s)
        self._speaking[answer] += spoken * H20_DECODE.step_s
        self._ledger.spoke(answer, spoken, now)

    def _drained(self, now: float, node: Node) -> None:
        if node.becoming is not None and not node.running and not node.away:
            node.away = True
            self._at(now + self.conversion_s, lambda at: self._converted(at, node))

    def _converted(self, now: float, node: Node) -> None:
        assert node.becoming is not None
        if self.fails:
            self._failed.append(node.name)
        else:
            node.stage = node.becoming
        node.becoming, node.away = None, False
        self._mark(now)
        self._feed(now)

    def _mark(self, now: float) -> None:
        serving = [node.stage for node in self.nodes if node.serving]
        self.changes.append(Change(now, serving.count(Stage.PREFILL), serving.count(Stage.DECODE)))

    def _step(self, now: float) -> None:
        for answer in self._speaking:
            self._count(now, answer)
        seen = Observation(
            nodes=tuple(
                LocalNode(n.name, KIND.name, n.stage, n.becoming, n.running, float(n.running > 0)) for n in self.nodes
            ),
            kinds=(KIND,),
            clusters=hybrid(100.0).clusters,
            kv=CASE_STUDY_KV,
            threshold=self.threshold,
            lengths=tuple(self._lengths),
            spoken=self._ledger.take(),
            waiting_prefill=len(self._remote) + len(self._local),
            waiting_decode=len(self._slots),
            failed=tuple(self._failed),
        )
        self._lengths, self._failed = [], []
        for action in self.controller.step(seen, now):
            match action:
                case SetThreshold(tokens=tokens):
                    self.threshold = tokens
                case Convert():
                    node = next(n for n in self.nodes if n.name == action.node_id)
                    assert node.serving
                    assert node.stage is action.stage.other
                    self.conversions.append((now, action))
                    node.becoming = action.stage
                    self._mark(now)
                    self._drained(now, node)
        self._feed(now)
        self._at(now + STEP_S, self._step)
