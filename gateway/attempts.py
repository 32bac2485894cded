"""One try at a request: two legs, one fate. Whatever ends one leg badly ends the other at once."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import structs

from gateway import plausible
from gateway.bell import Bell
from gateway.failures import AttemptFailed, node_gone, not_sent, told_by
from gateway.ordered_ways import OrderedWays
from gateway.sessions import NodeLost, NodeSession, codec_quality
from kvcache.control import (
    AnswerEnded,
    AnswerPart,
    Delta,
    Finished,
    FromNode,
    GenerateJob,
    PrefillDone,
    PrefillJob,
    PrefillStarted,
    TransferDone,
)
from kvcache.quality import Quality
from kvcache.tracing import NO_SPAN, Span
from scheduler.decision import Option
from scheduler.links import LinkState

MAX_UNREAD_DELTAS = 8192
HEARSAY_S = 0.5
_TRACED = ("codec", "raw_bytes", "wire_bytes", "transfer_s", "exposed_s", "prefill_s", "cached_tokens")


Hear = Callable[[AnswerPart], None]


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """The prefill side of an attempt: where, what to send there, what may carry the KV, and the range it covers.

    It should take ``expected_s`` once its turn has come, None where that was never measured, and ``chunk_s`` of that
    for the last chunk.
    """

    node: NodeSession
    job: PrefillJob
    link: LinkState
    ways: OrderedWays
    start: int
    stop: int
    chunk_tokens: int
    expected_s: float | None = None
    chunk_s: float = 0.0


class Preparation(Protocol):
    """What an attempt does before its legs are sent; it may fail without harm."""

    def start(self, then: Callable[[], None]) -> None:
        """Begin; ``then`` is called once, when it is over, unless it is closed before."""

    def close(self) -> None:
        """End it unheard. Idempotent."""

    @property
    def outcome(self) -> str:
        """One word for how it went; ``moved`` where all went well."""

    @property
    def wire_bytes(self) -> int:
        """What it has sent."""

    def record(self) -> dict[str, Any]:
        """What a decision record keeps of it."""


class Attempt:
    """Owns the jobs of one try on its two nodes; the caller reads ``next``, or is told, and must ``close`` it."""

    def __init__(
        self,
        number: int,
        option: Option,
        transfer: bytes,
        leg: PrefillLeg | None,
        decode: NodeSession,
        job: GenerateJob,
        quality: Quality,
        before: Preparation | None = None,
        span: Span = NO_SPAN,
    ) -> None:
        self.before = before
        self.number = number
        self.option = option
        self.transfer = transfer
        self.leg = leg
        self.decode = decode
        self.codec: str | None = None
        """What the KV came by, once it has."""
        self.exactness: Quality | None = None
        """What that codec made of it."""
        self._job = job
        self._span = span
        self._quality = quality
        self._answer = plausible.AnswerCheck(job)
        self._items: deque[AnswerPart] = deque()
        self._hear: Hear | None = None
        self._broken: Exception | None = None
        self._failure: AttemptFailed | None = None
        self._bell = Bell()
        self._transferred = leg is None
        self._computed = leg is None
        self._queued_bytes = 0
        self._cached_tokens = 0
        self._closed = False
        self._finished = False
        self._hearsay = False
        self._outcome: tuple[str, AttemptFailed | None] = ("running", None)
        self._dispatched_at = time.time()
        self._figures: dict[str, Any] = {}

    def dispatch(self) -> None:
        """Send both legs, after what comes before them. A node that is lost by then shows as the attempt's failure."""
        for slot in self._slots():
            self.decode.jobs[slot] = self
        if self.leg is not None:
            self.decode.awaited[self.transfer.hex()] = self
            self.leg.node.jobs[self.transfer.hex()] = self
            work = self.option.cached_tokens, self.leg.stop, self.leg.job.priority
            self.leg.node.prefilling.sent(self.transfer.hex(), *work)
            self._queued_bytes = self.option.wire_bytes
            self.leg.link.started(self._queued_bytes)
        if self.before is None:
            self._send()
        else:
            self.before.start(self._send)

    def _send(self) -> None:
        try:
            if self.leg is not None:
                self.leg.node.send(self.leg.job)
                if self.leg.expected_s is not None:
                    now = asyncio.get_running_loop().time()
                    self.leg.node.progress.begin(self.transfer.hex(), self.leg.expected_s, self.leg.chunk_s, now)
            self.decode.send(self._job)
        except NodeLost as lost:
            self._fail(not_sent(lost))

    async def next(self, timeout_s: float) -> AnswerPart:
        """The next piece of the answer. Raises AttemptFailed, and TimeoutError after ``timeout_s``."""
        if not self._items and self._failure is None:
            await self._bell.wait(asyncio.get_running_loop().time() + timeout_s)
        if self._items:
            return self._items.popleft()
        assert self._failure is not None
        raise self._failure

    def tell(self, hear: Hear | None) -> None:
        """From now on hand over each piece at once, first those that wait; with None they wait again, so many of them.

        What ``hear`` raises is raised by ``over``.
        """
        self._hear = hear
        while self._items and self._hear is not None:
            self._hand_over(self._hear, self._items.popleft())
        if not self._items and (self._finished or self._failure is not None):
            self._bell.ring()

    @property
    def unheard(self) -> bool:
        """Whether pieces wait to be handed over."""
        return bool(self._items)

    async def over(self, due: float) -> None:
        """Return when all of the answer was handed over.

        Raises AttemptFailed once what came before the failure was, what hearing it raised, and TimeoutError at ``due``,
        the event loop's time.
        """
        while True:
            if self._broken is not None:
                raise self._broken
            if not self._items and self._finished:
                return
            if not self._items and self._failure is not None:
                raise self._failure
            await self._bell.wait(due)

    def close(self, outcome: str, failure: AttemptFailed | None = None) -> None:
        """End both legs: what still runs is cancelled. Idempotent; the first outcome stays."""
        if self._closed:
            return
        self._closed = True
        self._outcome = (outcome, failure)
        self._bell.close()
        if self.before is not None:
            self.before.close()
        now = asyncio.get_running_loop().time()
        generation, *others = self._slots()
        for slot in others:
            self.decode.jobs.pop(slot, None)
        if self._finished:
            self.decode.jobs.pop(generation, None)
        else:
            self.decode.cancel(generation, now)
        if self.leg is not None:
            self.decode.awaited.pop(self.transfer.hex(), None)
            if not self._transferred:
                cached = max(self._cached_tokens, self.option.cached_tokens)
                self.leg.node.cancel(self.transfer.hex(), now, cached)
            self.leg.node.progress.end(self.transfer.hex(), now)
            self._computing_ended()
            self._transfer_ended()
        self._end_span()

    # ---- what nodes say

    def on_message(self, node: NodeSession, message: FromNode) -> None:
        """A message of one of the two jobs; one that the sender has no business to send ends the attempt."""
        if self._transferred and node is self.decode and isinstance(message, Delta):
            self._on_answer(message)  # nearly all that is said, so it is looked for first
            return
        if self._transferred and self._is_prefill(node) and not isinstance(message, PrefillStarted | PrefillDone):
            return  # its part is committed; nothing that it says can matter any more, but for what it had cached
        match message:
            case PrefillStarted() if self._is_prefill(node):
                self._on_started(message)
            case PrefillDone() if self._is_prefill(node):
                self._on_computed(node, message)
            case TransferDone() if node is self.decode and not self._transferred and self._can_be(message):
                needed = codec_quality(message.codec)
                if needed is not None and self._quality.allows(needed):
                    self._on_transferred(message, needed)
                else:
                    detail = f"{message.codec[:40]!r} is beyond {self._quality}"
                    self._fail(AttemptFailed("transfer", "codec", detail, node.node_id))
            case Delta() | AnswerEnded() | Finished() if node is self.decode and self._transferred:
                self._on_answer(message)
            case _:
                self._on_failed(told_by(node.node_id, message))

    def on_node_lost(self, node: NodeSession, cause: str) -> None:
        """One of the two nodes is gone. A prefill node whose transfer is committed is not missed."""
        if self._is_prefill(node) and self._transferred:
            return
        self._fail(node_gone(node.node_id, cause))

    def record(self) -> dict[str, Any]:
        """This attempt as a decision record keeps it."""
        outcome, failure = self._outcome
        entry: dict[str, Any] = {
            "attempt": self.number,
            "transfer": None if self.leg is None else self.transfer.hex(),
            "cluster": self.option.cluster,
            "prefill_node": self.option.prefill_node,
            "decode_node": self.option.decode_node,
            "codec": None if self.leg is None else self.option.codec,
            "exactness": None if self.leg is None else self.option.quality.value,
            "quality": self._quality.value,
            "outcome": outcome,
            "cause": None if failure is None else failure.cause,
            "stage": None if failure is None else failure.stage,
            "detail": None if failure is None else failure.detail,
        }
        if self.leg is not None:
            entry["range"] = [self.leg.start, self.leg.stop]
            entry["chunk_tokens"] = self.leg.chunk_tokens
        if self.before is not None:
            entry["move"] = self.before.record()
        return entry | self._figures

    def _end_span(self) -> None:
        outcome, failure = self._outcome
        told = {name: self._figures[name] for name in _TRACED if name in self._figures}
        self._span.note({f"prfaas.{name}": value for name, value in told.items()} | {"prfaas.outcome": outcome})
        self._span.end("" if failure is None else f"{failure.stage}: {failure.cause}")

    def _slots(self) -> list[str]:
        """The generation under its own name, and a name for each answer more: each takes a place on its node."""
        name = self._job.generation
        return [name, *(f"{name}#{answer}" for answer in range(1, self._job.answers))]

    def _is_prefill(self, node: NodeSession) -> bool:
        return self.leg is not None and node is self.leg.node

    def _can_be(self, done: TransferDone) -> bool:
        return plausible.transferred(done, self.option.transfer_bytes)

    def _on_started(self, started: PrefillStarted) -> None:
        assert self.leg is not None
        self._figures["prefill_started_after_s"] = time.time() - self._dispatched_at
        self._on_cached(started.cached_tokens)
        if self._transferred and not self._computed and self.transfer.hex() not in self.leg.node.jobs:
            self.leg.node.linger(self.transfer.hex(), self)  # this came late; its PrefillDone is still to come
        now = asyncio.get_running_loop().time()
        self.leg.node.prefilling.begun(self.transfer.hex(), self._cached_tokens, now)

    def _on_cached(self, tokens: int) -> None:
        """What a prefill node had of the prompt. Its word may come after that of the decode node, which is nearer."""
        assert self.leg is not None
        self._cached_tokens = self._figures["cached_tokens"] = min(max(0, tokens), self.leg.stop)

    def _on_computed(self, node: NodeSession, done: PrefillDone) -> None:
        assert self.leg is not None
        node.progress.computed(self.transfer.hex(), asyncio.get_running_loop().time())
        if "prefill_s" not in self._figures and plausible.computed(done, self.leg.stop):
            self._on_cached(done.cached_tokens)
            self._figures["prefill_s"] = done.compute_s
            node.speed.observe(self.leg.stop - done.tokens, self.leg.stop, done.compute_s)
        self._computing_ended()

    def _on_transferred(self, done: TransferDone, exactness: Quality) -> None:
        assert self.leg is not None
        self._transferred = True
        now = asyncio.get_running_loop().time()
        self.leg.link.observe(done.wire_bytes, done.transfer_s, done.exposed_s, now, self.option.codec_s)
        self.leg.node.progress.moved(now)
        self.leg.node.progress.end(self.transfer.hex(), now)
        self._transfer_ended()
        self.leg.node.jobs.pop(self.transfer.hex(), None)
        if not self._computed:
            self.leg.node.linger(self.transfer.hex(), self)  # its PrefillDone is still to be learnt from
        self.codec, self.exactness = done.codec, exactness
        self._figures.update(
            codec=done.codec,
            exactness=exactness.value,
            raw_bytes=done.raw_bytes,
            wire_bytes=done.wire_bytes,
            transfer_s=done.transfer_s,
            exposed_s=done.exposed_s,
            **self.leg.ways.took(done),
            kv_digest=done.kv_digest.hex(),
        )

    def _on_answer(self, item: AnswerPart) -> None:
        if self._finished:
            return
        wrong = self._answer.wrong(item)
        if wrong is not None:
            detail = f"{type(item).__name__}: {wrong}"
            self._fail(AttemptFailed("decode", "protocol", detail, self.decode.node_id))
            return
        if len(self._items) >= MAX_UNREAD_DELTAS:
            self._fail(AttemptFailed("decode", "slow_client", "the client does not read its answer"))
            return
        if isinstance(item, Finished):
            self._finished = True
            if self.leg is not None:  # the decode node does not know what its prefill node need not compute
                item = structs.replace(item, cached_tokens=self._cached_tokens)
        if self._hear is None:
            self._items.append(item)
            self._bell.ring()
            return
        self._hand_over(self._hear, item)
        if self._finished:
            self._bell.ring()

    def _hand_over(self, hear: Hear, item: AnswerPart) -> None:
        """Whose answer cannot be told must not do harm to the node that said it, and to all others' answers there."""
        try:
            hear(item)
        except Exception as error:
            self._hear, self._broken = None, error
            self._bell.ring()

    def _on_failed(self, failure: AttemptFailed) -> None:
        """``aborted`` is hearsay: the other leg has ended and says why itself. Give its word a moment to arrive."""
        if failure.cause == "aborted" and self.leg is not None and not self._hearsay:
            self._hearsay = True
            asyncio.get_running_loop().call_later(HEARSAY_S, self._fail, failure)
        else:
            self._fail(failure)

    def _fail(self, failure: AttemptFailed) -> None:
        """Keep the first failure and end the other leg now, whether or not anybody is waiting."""
        if self._closed or self._finished:
            return
        self._failure = failure
        if failure.cause == "corrupt" and self.leg is not None:
            self.leg.ways.corrupted()
        self.close("failed", failure)
        self._bell.ring()

    def _computing_ended(self) -> None:
        if self.leg is not None and not self._computed:
            self._computed = True
            self.leg.node.prefilling.ended(self.transfer.hex(), asyncio.get_running_loop().time())

    def _transfer_ended(self) -> None:
        if self.leg is not None:
            self.leg.link.ended(self._queued_bytes)
            self._queued_bytes = 0


def new_transfer() -> bytes:
    """A transfer id that nobody can guess."""
    return secrets.token_bytes(16)
