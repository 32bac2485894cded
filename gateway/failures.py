"""How the work of nodes fails: one kind of failure, and what each word of a node comes to."""

from __future__ import annotations

import re

from gateway.sessions import NodeLost
from kvcache.control import Cancelled, Failed, FromNode
from scheduler.retrying import Failure

MAX_DETAIL_CHARS = 500
_NOT_NOW = frozenset({"queue_full", "draining", "converting", "pool_full", "engine_lost"})
"""Why a node does not take a job that it would take at another time."""
_NO_NODES_FAULT = frozenset({"bad_order", "too_large", "slow_client", "prefix_gone", "aborted"})
_WORD = re.compile(r"[a-z][a-z0-9_]{0,39}")


class AttemptFailed(Exception):
    """The attempt is over. ``stage`` and ``cause`` are short words, safe to log; ``node_id`` says where it was noticed.

    ``detail`` is a node's own text, for operators only.
    """

    def __init__(self, stage: str, cause: str, detail: str = "", node_id: str | None = None) -> None:
        self.stage = stage if _WORD.fullmatch(stage) else "other"
        self.cause = cause if _WORD.fullmatch(cause) else "other"
        self.detail = detail[:MAX_DETAIL_CHARS]
        self.node_id = node_id
        super().__init__(f"stage={self.stage} cause={self.cause} node={node_id} detail={self.detail!r}")


def kind_of(failure: AttemptFailed) -> Failure:
    """What it means for another try, and for what is thought of the node."""
    stage, cause = failure.stage, failure.cause
    if cause in _NO_NODES_FAULT:
        return Failure.REQUEST
    if cause == "node_lost":
        return Failure.NOT_SENT if stage == "queue" else Failure.LOST
    if cause == "cancelled_by_node" or (stage == "queue" and cause in _NOT_NOW):
        return Failure.BUSY
    return Failure.LATE if cause in ("late", "deadline") else Failure.BROKEN


def told_by(node_id: str, message: FromNode) -> AttemptFailed:
    """What a message means to a job that cannot go on after it: a failure, the end of it, or nothing sensible."""
    match message:
        case Failed():
            return AttemptFailed(message.stage, message.cause, message.detail, node_id)
        case Cancelled():
            return AttemptFailed("queue", "cancelled_by_node", node_id=node_id)
        case _:
            return AttemptFailed("transfer", "protocol", f"{type(message).__name__} out of turn", node_id)


def node_gone(node_id: str, cause: str) -> AttemptFailed:
    """A node was lost with the job."""
    return AttemptFailed("node", "node_lost", cause, node_id)


def not_sent(lost: NodeLost) -> AttemptFailed:
    """A node was lost before the job could be sent there."""
    return AttemptFailed("queue", "node_lost", str(lost))
