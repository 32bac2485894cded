"""One joined node as the gateway sees it: what it said last, what it works on, and a bounded way to reach it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.joining.newcomer import Newcomer
from kvcache import control
from kvcache.control import Cancel, Cancelled, CodecWork, Heartbeat, Join, ToNode
from kvcache.quality import Quality
from kvcache.wire import Role
from scheduler.backlog import Backlog
from scheduler.codec_speeds import CodecSpeeds, Work
from scheduler.prefill_curve import PrefillTimes
from scheduler.progress import Progress

MAX_BACKLOG_BYTES = 64 << 20
MAX_BACKLOG_MESSAGES = 4096
MAX_CANCELS = 4096
MAX_LINGERING = 256
MAX_CODECS = 64
MAX_CODEC_CHARS = 256


NOTHING_SHOWN = Newcomer()


def _nobody_cares() -> None:
    """Nothing."""


class NodeLost(Exception):
    """The node's stream is gone; nothing sent to it now arrives."""


class JobOwner(Protocol):
    """Who hears of a job's messages, and of the loss of its node."""

    def on_message(self, node: NodeSession, message: control.FromNode) -> None:
        """A message that names one of the owner's jobs."""

    def on_node_lost(self, node: NodeSession, cause: str) -> None:
        """Said once for every owner with a job here."""


class NodeSession:
    """State of one stream, from Join to its loss. All methods run on the event loop.

    ``jobs`` are what the node was given, by job id; ``awaited`` are the transfers that it is to receive, which belong
    to those jobs and take no slot of their own.
    """

    def __init__(self, join: Join, now: float, credentials: Newcomer = NOTHING_SHOWN) -> None:
        self.join = join
        self.credentials = credentials
        self.node_id = join.node_id
        self.incarnation = join.incarnation
        self.joined_at = now
        self.last_heard = now
        self.heartbeat: Heartbeat | None = None
        self.speed = PrefillTimes()
        self.codecs = CodecSpeeds()
        for work in join.codecs[:MAX_CODECS]:
            quality = codec_quality(work.codec)
            if quality is not None:
                self.codecs.know(work.codec, quality, *_encoded_decoded(work))
        self.jobs: dict[str, JobOwner] = {}
        self.awaited: dict[str, JobOwner] = {}
        self.prefilling = Backlog()
        self.progress = Progress()
        self.becoming: Role | None = None
        """The role that a conversion leads to; None where there is none. It gets no work meanwhile."""
        self.lost: str | None = None
        self.changed: Callable[[], None] = _nobody_cares
        """Called where it is lost or plays another role."""
        self.say: Callable[[bytes], bool] | None = None
        """Writes a message at once, or says that it has to wait; set once there is somewhere to write to."""
        self.others_jobs = 0
        """Jobs there that other gateways gave, as it said last, or as far as it counts more than was sent from here."""
        self._others_tokens: int | None = None
        self._lingering: OrderedDict[str, JobOwner] = OrderedDict()
        self._cancels: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._writing = False
        self._wake = asyncio.Event()

    @property
    def accepting(self) -> bool:
        """Whether it said that it takes jobs, can still be reached, and is not being converted."""
        return self.lost is None and self.becoming is None and self.heartbeat is not None and self.heartbeat.accepting

    @property
    def sending(self) -> bool:
        """Whether transfers are open there, as it said last."""
        return self.heartbeat is not None and self.heartbeat.open_transfers > 0

    @property
    def free_slots(self) -> int:
        """Jobs it may still take, beside those that were sent from here and what it counted of others' last."""
        return max(0, self.join.max_queue - len(self.jobs) - self.others_jobs)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait there or are being computed."""
        if self._others_tokens is not None:
            return self.prefilling.tokens + self._others_tokens
        counted = 0 if self.heartbeat is None else self.heartbeat.queued_tokens
        return max(counted, self.prefilling.tokens)

    def queued_s(self, now: float) -> float | None:
        """Seconds until what waits or runs there is done, by its own prefill times; None while they are not known.

        What comes last is left out. What the node counts beyond what was sent to it from here is another gateway's, and
        taken for one prompt.
        """
        curve = self.speed.curve
        if curve is None:
            return None if self.queued_tokens else 0.0
        others = curve.seconds(0, self.queued_tokens - self.prefilling.tokens)
        return others + self.prefilling.seconds(curve, now, last=False)

    def sent_s(self, now: float, last: bool) -> float:
        """Seconds of what was sent from here and does, or does not, come last; 0 while prefill times are not known."""
        curve = self.speed.curve
        return 0.0 if curve is None else self.prefilling.seconds(curve, now, last)

    def heard(self, heartbeat: Heartbeat, now: float) -> None:
        """Take what it says of itself, and learn from what its codecs have done since it last said so."""
        self.heartbeat = heartbeat
        if heartbeat.others_jobs is None:
            self.others_jobs = max(0, heartbeat.queued_jobs + heartbeat.running - len(self.jobs))
        else:
            self.others_jobs, self._others_tokens = max(0, heartbeat.others_jobs), max(0, heartbeat.others_tokens)
        if heartbeat.role is not None and heartbeat.role_epoch > self.join.role_epoch:
            self.plays(heartbeat.role, heartbeat.role_epoch)  # another gateway ordered it
        self.speed.claim(heartbeat.prefill_tokens_per_s)
        for work in heartbeat.codecs[:MAX_CODECS]:
            self.codecs.count(work.codec, *_encoded_decoded(work), now)

    def plays(self, role: Role, epoch: int) -> None:
        """Its role from now on, and the epoch of the order that it answered."""
        self.join = msgspec.structs.replace(self.join, role=role, role_epoch=max(epoch, self.join.role_epoch))
        self.changed()

    def send(self, message: ToNode) -> None:
        """Write or queue a message. Raises NodeLost where the stream is gone, or too slow for what is queued."""
        if self.lost is not None:
            raise NodeLost(self.lost)
        data = control.encode(message)
        if self.say is not None and not (self._backlog or self._writing) and self.say(data):
            return
        if len(self._backlog) >= MAX_BACKLOG_MESSAGES or self._backlog_bytes + len(data) > MAX_BACKLOG_BYTES:
            self.lose("backlog")
            raise NodeLost("backlog")
        self._backlog.append(data)
        self._backlog_bytes += len(data)
        self._wake.set()

    async def next_outbound(self, timeout_s: float) -> bytes | None:
        """The next message that had to wait; None after ``timeout_s`` without one. Raises NodeLost once lost.

        Until the next call it is taken to be under way.
        """
        self._writing = False
        if self.lost is None and not self._backlog:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        if self.lost is not None:
            raise NodeLost(self.lost)
        data = self._backlog.popleft()
        self._backlog_bytes -= len(data)
        self._writing = True
        return data

    def owner(self, job: str) -> JobOwner | None:
        """Whom a message about a job concerns; None for a job that is over."""
        return self.jobs.get(job) or self.awaited.get(job) or self._lingering.pop(job, None)

    def linger(self, job: str, owner: JobOwner) -> None:
        """A job that is over but for one last message, which may never come."""
        self._lingering[job] = owner
        if len(self._lingering) > MAX_LINGERING:
            self._lingering.popitem(last=False)

    def cancel(self, job: str, now: float, cached_tokens: int = 0) -> None:
        """Forget a job's owner and tell the node to end it; a lost node has nothing to end.

        The node has no computing to do for ``cached_tokens`` of it.
        """
        if self.jobs.pop(job, None) is None or self.lost is not None:
            return
        self._cancels[job] = now, cached_tokens
        if len(self._cancels) > MAX_CANCELS:
            self._cancels.popitem(last=False)
        try:
            self.send(Cancel(job))
        except NodeLost:
            self._cancels.clear()

    def cancelled(self, told: Cancelled, now: float) -> float | None:
        """Seconds from the Cancel of a job to the node's word that it holds nothing of it; None if not asked for.

        What it had computed of it by then shows that it works, only too slowly for that job.
        """
        asked = self._cancels.pop(told.job, None)
        if asked is None:
            return None
        at, cached_tokens = asked
        if told.prefilled_tokens > cached_tokens:
            self.progress.moved(now)
        return now - at

    def lose(self, cause: str) -> None:
        """The stream is gone: every owner of a job hears it once. Idempotent."""
        if self.lost is not None:
            return
        self.lost = cause
        self.changed()
        self._wake.set()
        owners = {id(owner): owner for owner in self.jobs.values()}
        self.jobs.clear()
        self.awaited.clear()
        for owner in owners.values():
            owner.on_node_lost(self, cause)


def codec_quality(name: str) -> Quality | None:
    """The strictest level that allows every codec in a set of that name; None for what no level does."""
    if len(name) > MAX_CODEC_CHARS:
        return None
    default, *choices = name.split(",")
    return Quality.needed_for([default, *(choice.partition("=")[2] for choice in choices)])


def _encoded_decoded(work: CodecWork) -> tuple[Work, Work]:
    encoded = Work(work.encoded_bytes, work.wire_bytes, work.encode_s)
    return encoded, Work(work.decoded_bytes, work.decoded_bytes, work.decode_s)
