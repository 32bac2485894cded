"""A prefix that goes to an attempt's prefill node before it begins: what is asked of both nodes, and for how long.

It can only gain time: whatever becomes of it the attempt goes on, and the prefill node computes what did not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway import plausible
from gateway.failures import AttemptFailed, node_gone, not_sent, told_by
from gateway.ordered_ways import OrderedWays
from gateway.sessions import NodeLost, NodeSession, codec_quality
from kvcache.control import FromNode, SharePrefix, TakePrefix, TransferDone
from kvcache.quality import Quality
from scheduler.decision import Move
from scheduler.links import LinkState

CODEC = "raw"
"""Exact, so that what is kept serves every later request; and what a move is predicted by."""
PATIENCE_S = 1.0
MOVED = "moved"


def patience_s(move: Move) -> float:
    """How long an attempt waits for its prefix: twice what was predicted, or a second more."""
    return max(2 * move.predicted_s, move.predicted_s + PATIENCE_S)


@dataclass(frozen=True, slots=True)
class MoveOrders:
    """Both sides of a move: where, and what to send there. ``link`` is the way it takes, ``ways`` what carries it."""

    transfer: bytes
    source: NodeSession
    target: NodeSession
    share: SharePrefix
    take: TakePrefix
    link: LinkState
    ways: OrderedWays


class PrefixMove:
    """Owns both jobs of one move. ``start`` once; ``close`` ends it unheard."""

    def __init__(self, orders: MoveOrders, planned: Move) -> None:
        self._orders = orders
        self._planned = planned
        self._job = orders.transfer.hex()
        self._then: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._outcome = "waiting"
        self._figures: dict[str, Any] = {}

    @property
    def outcome(self) -> str:
        """``waiting``, ``moved``, ``failed``, ``late`` or ``closed``."""
        return self._outcome

    @property
    def wire_bytes(self) -> int:
        """What has come, where all has."""
        return int(self._figures.get("wire_bytes", 0))

    def start(self, then: Callable[[], None]) -> None:
        """Send both orders; ``then`` is called once, when the prefix is there or is not waited for any more."""
        loop, orders = asyncio.get_running_loop(), self._orders
        self._then, self._began = then, loop.time()
        self._timer = loop.call_later(patience_s(self._planned), self._end, "late")
        orders.link.started(self._planned.nbytes)
        for node in (orders.source, orders.target):
            node.jobs[self._job] = self
        try:
            orders.source.send(orders.share)
            orders.target.send(orders.take)
        except NodeLost as lost:
            self._fail(not_sent(lost))

    def close(self) -> None:
        """Nobody waits for it any more. Idempotent."""
        self._then = None
        self._end("closed")

    def on_message(self, node: NodeSession, message: FromNode) -> None:
        """A message of one of its jobs. What neither has any business to say ends it."""
        match message:
            case TransferDone() if node is self._orders.target and self._can_be(message):
                self._moved(message)
            case _:
                self._fail(told_by(node.node_id, message))

    def on_node_lost(self, node: NodeSession, cause: str) -> None:
        """One of the two nodes is gone."""
        self._fail(node_gone(node.node_id, cause))

    def record(self) -> dict[str, Any]:
        """This move as a decision record keeps it."""
        planned = self._planned
        return {
            "transfer": self._job,
            "source_cluster": planned.source_cluster,
            "source_node": planned.source_node,
            "range": [planned.start, planned.stop],
            "outcome": self._outcome,
        } | self._figures

    def _can_be(self, done: TransferDone) -> bool:
        return plausible.transferred(done, self._planned.nbytes) and codec_quality(done.codec) is Quality.EXACT

    def _moved(self, done: TransferDone) -> None:
        now = asyncio.get_running_loop().time()
        self._orders.link.observe(done.wire_bytes, done.transfer_s, done.exposed_s, now)
        self._figures.update(
            codec=done.codec,
            raw_bytes=done.raw_bytes,
            wire_bytes=done.wire_bytes,
            transfer_s=done.transfer_s,
            **self._orders.ways.took(done),
            kv_digest=done.kv_digest.hex(),
        )
        for node in (self._orders.source, self._orders.target):
            node.jobs.pop(self._job, None)
        self._end(MOVED)

    def _fail(self, failure: AttemptFailed) -> None:
        if self._outcome == "waiting":
            self._figures.update(
                stage=failure.stage, cause=failure.cause, detail=failure.detail, failed_node=failure.node_id
            )
        self._end("failed")

    def _end(self, outcome: str) -> None:
        """Cancel what still runs and go on. The first outcome stays."""
        if self._outcome != "waiting":
            return
        self._outcome = outcome
        if self._timer is not None:
            now = asyncio.get_running_loop().time()
            self._timer.cancel()
            self._figures["seconds"] = now - self._began
            self._orders.link.ended(self._planned.nbytes)
            for node in (self._orders.source, self._orders.target):
                node.cancel(self._job, now)
        if self._then is not None:
            self._then()
