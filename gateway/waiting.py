"""Waiting at the gateway: what no node has room for stands in a fair queue until one has, or its time is over.

One pump decides for all of them, in the queue's order, whenever a job ends and ten times a second while anybody waits.
A request whose turn has come is sent in the same step, so that nobody else can take its place meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gateway.admission_metrics import AdmissionMetrics
from gateway.errors import ApiError
from scheduler.admission.draining import DrainRate
from scheduler.admission.fair_queue import FairQueue, QueueFull, Waiting
from scheduler.admission.node_order import NodeOrder

TICK_S = 0.1
"""For room that no ended job tells of: a heartbeat, a node that joins, a cluster that is resumed."""
MOST_TURNS = 32
"""Requests sent in one go; then the event loop has its turn."""
MOST_TRIES = 8
"""Kinds of requests that are tried in vain before the next tick."""
MOST_TOKENS = 8 << 20
"""Of prompts in the queue: some 300 MB of ids."""
MOST_RETRY_S = 60.0
_WHY = {"requests": "requests wait", "tokens": "prompt tokens wait"}


@dataclass(slots=True)
class _Place:
    """How to send one request that waits, and whom to tell."""

    start: Callable[[], bool]
    turn: asyncio.Future[None]


class WaitingRoom:
    """The queue of one gateway. ``room`` says whether any node can take anything at all. ``most`` 0: nobody waits."""

    def __init__(self, most: int, timeout_s: float, room: Callable[[], bool]) -> None:
        self.metrics = AdmissionMetrics(lambda: (len(self._queue), self._queue.tokens, len(self._queue.shares)))
        self._most = most
        self._timeout_s = timeout_s
        self._room = room
        self._queue = FairQueue(max(1, most), MOST_TOKENS)
        self._drain = DrainRate()
        self._on_nodes = NodeOrder()
        self._places: dict[Waiting, _Place] = {}
        self._tick: asyncio.Handle | None = None
        self._nodes_by = float("-inf")
        self._soon = False

    def expect_nodes(self, for_s: float) -> None:
        """Nodes are on their way: who finds none waits for them so long."""
        self._nodes_by = asyncio.get_running_loop().time() + for_s

    @property
    def expecting(self) -> bool:
        """Whether a request that finds no node at all should wait."""
        return asyncio.get_running_loop().time() < self._nodes_by

    def follow(self, most: int, timeout_s: float) -> None:
        """Other bounds, for whoever comes from now on; those that wait keep their places and times."""
        self._most, self._timeout_s = most, timeout_s
        self._queue.most = max(1, most)

    def anybody_before(self, last: bool) -> bool:
        """Whether somebody waits whose turn comes before that of a newcomer."""
        return self._queue.anybody_before(last)

    def anybody_last(self, needs: Hashable) -> bool:
        """Whether one with these needs waits until nothing else can be placed; a newcomer with them joins it."""
        return self._queue.anybody_last(needs)

    def send(self, account: str, work_s: float, weight: float, last: bool) -> int:
        """A request goes to nodes, with this rank in their queues; ``back`` follows."""
        return self._on_nodes.sent(account, work_s, weight, last)

    def back(self, account: str, work_s: float) -> None:
        """It is over there, so nodes may have room."""
        self._on_nodes.ended(account, work_s)
        self.kick()

    def passed(self, account: str, work_s: float, weight: float) -> None:
        """A request was sent without waiting."""
        self._queue.charge(account, work_s, weight)
        self.metrics.admitted.labels("at_once").inc()

    def settle(self, account: str, more_s: float, weight: float) -> None:
        """A request that was sent has ended, and was so much more work than predicted, or less."""
        self._queue.settle(account, more_s, weight)

    def wait_s(self, entry: Waiting) -> float | None:
        """How long it would wait here; None where nothing tells."""
        rate = self._drain.rate(asyncio.get_running_loop().time())
        return self._queue.ahead_s(entry) / rate if rate else None

    async def wait(self, entry: Waiting, start: Callable[[], bool], patience_s: float) -> None:
        """Return when ``start`` has sent the request, which it says by True. Raises what it raises, and ApiError.

        ``patience_s`` is how long it may wait at most, if that is less than the queue's time-out.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not self._most:
            raise self.refused("no_queue", 503, "all nodes are full and this gateway queues nothing (--queue 0)", 1.0)
        self._add(entry)
        self._drain.busy(began)
        place = self._places[entry] = _Place(start, loop.create_future())
        limit = min(self._timeout_s, max(0.0, patience_s))
        timer = loop.call_later(limit, self._give_up, entry, limit)
        self.kick()
        try:
            await place.turn
            self.metrics.admitted.labels("queued").inc()
        finally:
            timer.cancel()
            self._gone(entry)
            self.metrics.queue_s.observe(loop.time() - began)

    def kick(self) -> None:
        """Something has changed: look whether a request can be sent."""
        if self._soon or not self._places:
            return
        self._soon = True
        asyncio.get_running_loop().call_soon(self._pump)

    def refused(self, reason: str, status: int, message: str, retry_after_s: float | None, code: str = "") -> ApiError:
        """Count a refusal and make its answer."""
        self.metrics.refused.labels(reason).inc()
        after = None if retry_after_s is None else min(MOST_RETRY_S, retry_after_s)
        return ApiError(
            status, message, code=code or ("overloaded" if reason == "no_queue" else reason), retry_after_s=after
        )

    def view(self) -> dict[str, object]:
        """What operators see of it."""
        queue = self._queue
        return {
            "waiting": len(queue),
            "queue": self._most,
            "tokens": queue.tokens,
            "timeout_s": self._timeout_s,
            "accounts": dict(sorted(queue.shares.items(), key=lambda one: -one[1])[:20]),
        }

    def _add(self, entry: Waiting) -> None:
        try:
            pushed = self._queue.add(entry)
        except QueueFull as full:
            raise self._full(entry, full.what, full.own) from full
        for other in pushed:
            place = self._places.get(other)
            if place is not None and not place.turn.done():
                place.turn.set_exception(self._full(other, "requests", own=True))

    def _full(self, entry: Waiting, what: str, own: bool) -> ApiError:
        has = len(self._queue) if what == "requests" else self._queue.tokens
        full = f"the queue of this gateway is full: {has} {_WHY[what]} (--queue {self._most})"
        after = self.wait_s(entry) or 1.0
        if own:
            text = f"{full}, and your tenant has its share of it; send fewer requests at once"
            return self.refused("queue_share", 429, text, after, "queue_full")
        return self.refused("queue_full", 503, f"{full}; try again later, or add nodes", after)

    def _give_up(self, entry: Waiting, after_s: float) -> None:
        place = self._places.get(entry)
        if place is None or place.turn.done():
            return
        if after_s < self._timeout_s:
            text, reason = f"no node had room within the {after_s:.3g} s that the request allows", "slo_unattainable"
        else:
            text, reason = f"no node had room within {after_s:g} s (--queue-timeout)", "queue_timeout"
        place.turn.set_exception(
            self.refused(reason, 503, f"{text}; {len(self._queue)} requests wait; try again later, or add nodes", 1.0)
        )

    def _gone(self, entry: Waiting) -> None:
        self._places.pop(entry, None)
        self._queue.remove(entry)
        if not self._queue:
            self._drain.empty()

    def _pump(self) -> None:
        self._soon = False
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        loop = asyncio.get_running_loop()
        turns, vain = 0, set[Hashable]()
        while turns < MOST_TURNS and len(vain) < MOST_TRIES and self._room():
            entry = self._queue.next(vain)
            if entry is None:
                break
            place = self._places[entry]
            if place.turn.done():  # it left, or its time was over; its own task has not run since
                self._queue.remove(entry)
                continue
            turns += 1
            try:
                sent = place.start()
            except Exception as error:  # it is that request's own, whatever it is
                self._queue.remove(entry)
                place.turn.set_exception(error)
                continue
            if sent:
                self._drain.took(entry.work_s, loop.time())
                self._queue.take(entry)
                place.turn.set_result(None)
            else:
                vain.add(entry.needs)
        if turns >= MOST_TURNS:
            self.kick()
        elif self._queue:
            self._tick = loop.call_later(TICK_S, self._pump)
