"""Changing a running node's role without losing a request: drain, flip, verify, rejoin, or back to the old role.

A node that is being converted gets no new work from the moment on that its conversion begins; what it has, it ends as
always. Every phase has a deadline. Whatever goes wrong before the flip leaves the node as it was; after it, the node is
ordered back under a newer epoch. A node that cannot be put back is given no work until it joins anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from gateway.errors import ApiError, bad_field
from gateway.executors import ConversionFailed, Executors, Order
from gateway.history import ConversionRecord, History, Phase
from gateway.leadership import Leadership
from gateway.registry import Registry
from gateway.sessions import NodeSession
from kvcache.wire import Role

log = logging.getLogger(__name__)

POLL_S = 0.02
MAX_REASON_CHARS = 500

Verify = Callable[[NodeSession, Role], Awaitable[None]]
"""Does a small piece of real work through a node in its new role. Raises ConversionFailed."""


@dataclass(frozen=True, slots=True)
class ConversionLimits:
    """Seconds that each phase may take."""

    drain_s: float = 600.0
    flip_s: float = 60.0
    verify_s: float = 60.0


class Conversions:
    """Begins conversions, and is asked what became of them. One per node at a time; tasks live on the event loop."""

    def __init__(
        self,
        registry: Registry,
        executors: Executors,
        verify: Verify,
        history: History,
        leadership: Leadership,
        limits: ConversionLimits,
    ) -> None:
        self._registry = registry
        self._executors = executors
        self._verify = verify
        self._history = history
        self._leadership = leadership
        self._limits = limits
        self._running: dict[str, tuple[ConversionRecord, asyncio.Task[None]]] = {}
        self._failed: list[str] = []
        self._elsewhere: dict[str, Role] = {}
        self.counts: dict[Phase, int] = {}
        """How many ended in each way."""

    def check(self, node_id: str, role: Role) -> NodeSession:
        """The node, if it can be converted. Raises ApiError saying why it cannot."""
        session = self._registry.node(node_id)
        if session is None:
            raise ApiError(404, f"no node is named {node_id[:63]!r}", param="node", code="node_not_found")
        if node_id in self._running:
            raise _conflict(f"{node_id} is being converted already", "conversion_running")
        if session.join.role is role:
            raise _conflict(f"{node_id} plays {role.name.lower()} already", "role_unchanged")
        why = self._registry.cannot_play(session, role)
        if why is not None:
            raise _conflict(why, "role_impossible")
        if session.join.role is Role.DECODE:
            others = self._registry.nodes(self._registry.local_cluster, Role.DECODE)
            if not any(other.accepting for other in others if other is not session):
                raise _conflict(f"{node_id} is the last decode node that accepts work", "last_decode_node")
        return session

    def begin(
        self,
        node_id: str,
        role: Role,
        reason: str,
        by: str,
        *,
        epoch: int | None = None,
        proposal: int | None = None,
        figures: dict[str, Any] | None = None,
    ) -> ConversionRecord:
        """Start one and return its record. Raises ApiError."""
        if not self._leadership.leads:
            raise not_leader(self._leadership)
        if len(reason) > MAX_REASON_CHARS:
            raise bad_field("reason", f"reason: at most {MAX_REASON_CHARS} characters")
        session = self.check(node_id, role)
        epoch = self._leadership.next_epoch() if epoch is None else epoch
        now = time.time()
        record = self._history.begin(
            ConversionRecord(
                id=0,
                node_id=node_id,
                role_from=session.join.role.name.lower(),
                role_to=role.name.lower(),
                epoch=epoch,
                began=now,
                phase=Phase.DRAINING,
                reason=reason,
                by=by,
                proposal=proposal,
                steps=((now, Phase.DRAINING),),
                figures=figures or {},
            )
        )
        session.becoming = role
        log.info("conversion id=%d node=%s to=%s epoch=%d by=%s", record.id, node_id, record.role_to, epoch, by)
        task = asyncio.create_task(self._run(session, Order(session, role, epoch)))
        self._running[node_id] = (record, task)
        return record

    def record(self, number: int) -> ConversionRecord | None:
        """One conversion, as it is now."""
        running = next((record for record, _ in self._running.values() if record.id == number), None)
        return running or self._history.conversion(number)

    def take_failed(self) -> tuple[str, ...]:
        """Nodes whose conversion did not end well since the last call."""
        failed, self._failed = tuple(self._failed), []
        return failed

    # ---- among several gateways

    def elsewhere(self, kind: str, row: bytes) -> None:
        """What another gateway has kept in its history: a node that it converts gets no work from here either."""
        if kind != "conversion":
            return
        record = msgspec.json.decode(row, type=ConversionRecord)
        if not record.phase.over:
            self._elsewhere[record.node_id] = Role[record.role_to.upper()]
        elif self._elsewhere.pop(record.node_id, None) is not None and record.phase is not Phase.STUCK:
            self._free(record.node_id)

    def mark(self) -> None:
        """Give no work to nodes that another gateway converts, also to those that have joined since."""
        for node_id, role in self._elsewhere.items():
            session = self._registry.node(node_id)
            if session is not None:
                session.becoming = role

    def took_over(self) -> None:
        """This gateway leads from now on: what an earlier leader left in the middle is over."""
        self._elsewhere.clear()
        for record in self._history.end_unfinished([record.id for record, _ in self._running.values()]):
            self._free(record.node_id)

    def abandon(self) -> None:
        """Another gateway leads: what runs here is given up. Its orders outweigh those that were given from here."""
        for node_id, (_, task) in list(self._running.items()):
            task.cancel()
            task.add_done_callback(partial(self._given_up, node_id))

    def _given_up(self, node_id: str, _: asyncio.Task[None]) -> None:
        self._free(node_id)

    def _free(self, node_id: str) -> None:
        session = self._registry.node(node_id)
        if session is not None and node_id not in self._running:
            session.becoming = None

    async def close(self) -> None:
        """End what runs: a node in the middle is put back where that can be done at once. Idempotent."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one conversion

    async def _run(self, session: NodeSession, order: Order) -> None:
        before = session.join.role
        flipped = False
        try:
            await self._within(self._limits.drain_s, self._drained(session), "drain")
            self._enter(session, Phase.FLIPPING)
            flipped = True
            for executor in self._executors.of(session.node_id):
                await self._within(self._limits.flip_s, executor.change(order), "flip")
            self._enter(session, Phase.VERIFYING)
            await self._within(self._limits.verify_s, self._verify(session, order.role), "verify")
        except ConversionFailed as failure:
            log.warning("conversion node=%s failed: %s", session.node_id, failure)
            await self._undo(session, before, flipped, str(failure))
        except asyncio.CancelledError:
            self._end(session, Phase.INTERRUPTED, "the gateway is stopping")
            raise
        except Exception as error:
            log.exception("conversion node=%s broke", session.node_id)
            await self._undo(session, before, flipped, f"broke: {type(error).__name__}")
        else:
            session.becoming = None
            self._end(session, Phase.DONE, "")

    async def _undo(self, session: NodeSession, before: Role, flipped: bool, why: str) -> None:
        if session.lost is not None:
            self._end(session, Phase.LOST, why)
            return
        if flipped:
            self._enter(session, Phase.RESTORING)
            try:
                order = Order(session, before, self._leadership.next_epoch())
                for executor in self._executors.of(session.node_id):
                    await self._within(self._limits.flip_s, executor.change(order), "restore")
            except (ConversionFailed, ApiError) as failure:
                ended = Phase.LOST if session.lost is not None else Phase.STUCK
                self._end(session, ended, f"{why}; then putting it back failed: {failure}")
                return
        session.becoming = None
        self._end(session, Phase.ROLLED_BACK, why)

    async def _drained(self, session: NodeSession) -> None:
        """Return when nothing that was sent there is at hand any more. Raises ConversionFailed where the node left."""
        while session.jobs or session.awaited or session.others_jobs:
            if session.lost is not None:
                break
            await asyncio.sleep(POLL_S)  # jobs end in many places; none of them need know of conversions
        if session.lost is not None:
            raise ConversionFailed("node_lost", f"{session.node_id} left: {session.lost}")

    async def _within(self, seconds: float, work: Awaitable[None], phase: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError:
            raise ConversionFailed(f"{phase}_timeout", f"the {phase} took longer than {seconds:g} s") from None

    def _enter(self, session: NodeSession, phase: Phase) -> None:
        record, task = self._running[session.node_id]
        record = msgspec.structs.replace(record, phase=phase, steps=(*record.steps, (time.time(), phase)))
        self._running[session.node_id] = (record, task)
        self._keep(record)

    def _end(self, session: NodeSession, phase: Phase, detail: str) -> None:
        record, _ = self._running.pop(session.node_id)
        now = time.time()
        self._keep(
            msgspec.structs.replace(
                record, phase=phase, ended=now, detail=detail[:1000], steps=(*record.steps, (now, phase))
            )
        )
        self.counts[phase] = self.counts.get(phase, 0) + 1
        if phase is not Phase.DONE:
            self._failed.append(session.node_id)
        log.info("conversion id=%d node=%s ended=%s after_s=%.1f", record.id, record.node_id, phase, now - record.began)

    def _keep(self, record: ConversionRecord) -> None:
        try:
            self._history.keep(record)
        except ApiError as error:  # the node must not be left in the middle because a disk is full
            log.error("conversion id=%d not written: %s", record.id, error)


def not_leader(leadership: Leadership) -> ApiError:
    """What is answered where only the leader may act."""
    where = f": {leadership.leader}" if leadership.leader else ""
    return ApiError(409, f"this gateway does not lead; ask the one that does{where}", code="not_leader")


def _conflict(message: str, code: str) -> ApiError:
    return ApiError(409, message, param="node", code=code)
