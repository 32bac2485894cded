"""Bring a transfer of a ``Pair`` to a given stage and hold it there."""

from __future__ import annotations

import asyncio

from kvcache.control import TransferDone
from tests.pair import Job, Pair

BEFORE_COMMIT = ("queued", "computing", "granting", "streaming")
AFTER_COMMIT = ("loading", "speaking")
STAGES = BEFORE_COMMIT + AFTER_COMMIT

_BLOCKER = "blocker"


async def reach(nodes: Pair, job: Job, stage: str) -> None:
    """Start both legs and return when the transfer is at ``stage``, where it stays."""
    prefill, decode = nodes.prefill, nodes.decode
    match stage:
        case "queued":
            prefill.pages.allocate(_BLOCKER, prefill.pages.free_pages)
        case "computing":
            prefill.engine.gate.clear()
        case "granting":
            decode.pages.allocate(_BLOCKER, decode.pages.free_pages)
        case "streaming":
            prefill.engine.hold_at = 1
        case "loading":
            decode.engine.load.clear()
        case "speaking":
            decode.engine.voice.clear()
    nodes.start(job)
    if stage in AFTER_COMMIT:
        await decode.told(TransferDone, job.transfer)
        await decode.until(lambda: job.generation in decode.engine.jobs)
        if stage == "speaking":
            await decode.until(lambda: not decode.pages.owners)
        await prefill.serving.settled()
        return
    transfer = job.ticket.transfer
    await prefill.until(lambda: transfer in prefill.serving._exports and prefill.serving._exports[transfer].peer)
    if stage != "queued":
        await prefill.until(lambda: job.transfer in prefill.engine.jobs or prefill.engine.prefilled)
    if stage == "granting":
        await decode.until(lambda: decode.room.waiting)
    if stage == "streaming":
        await decode.until(lambda: decode.asking._by_transfer[transfer].fetch._incoming.next_seq > 0)
    await asyncio.sleep(0.01)


def release(nodes: Pair) -> None:
    """Let go of whatever holds transfers back."""
    for side in (nodes.prefill, nodes.decode):
        side.room.release(_BLOCKER)
        side.engine.hold_at = None
        for event in (side.engine.gate, side.engine.load, side.engine.voice):
            event.set()
