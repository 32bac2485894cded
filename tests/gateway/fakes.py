"""A node that speaks the control protocol over a real WebSocket, strictly, and answers by script."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import websockets
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcache import control
from kvcache.control import (
    AnswerEnded,
    Beat,
    Cancel,
    Cancelled,
    ChangeRole,
    CodecWork,
    Delta,
    Drain,
    Failed,
    Finished,
    GenerateJob,
    Heartbeat,
    Join,
    KvAddress,
    LinkReport,
    ModelInfo,
    PrefillDone,
    PrefillJob,
    PrefillStarted,
    ProbeLink,
    RateLease,
    Refused,
    ReplayKvEvents,
    RoleChanged,
    SharePrefix,
    TakePrefix,
    TokenLogprob,
    TransferDone,
    Welcome,
)
from kvcache.control.audits import AuditKv
from kvcache.control.renewal import CertificateIssued
from kvcache.control.replicas import Siblings
from kvcache.ticket import verify_ticket
from kvcache.wire import Role

Script = Callable[["FakeNode", Any], Awaitable[None]]
ANSWER = (300, 301, 302)
RAW_BYTES, WIRE_BYTES = 256, 128
CODECS = (CodecWork("lossless", 10**6, 7 * 10**5, 1e-3, 10**6, 1e-3),)


class FakeNode:
    """Joins, beats, checks every order, and runs ``on_prefill`` or ``on_generate`` for each job."""

    def __init__(
        self,
        url: str,
        name: str,
        role: Role,
        model: ModelInfo,
        *,
        cluster: str = "local",
        incarnation: str = "one",
        kv: bool = True,
        token: str | None = None,
        max_queue: int = 8,
        on_prefill: Script | None = None,
        on_generate: Script | None = None,
        on_share: Script | None = None,
        on_take: Script | None = None,
        speed: float = 1000.0,
        codecs: tuple[CodecWork, ...] = CODECS,
        kv_events: bool = False,
        probes: bool = False,
        converts: bool = True,
        topology: bytes = b"",
        moves: bool = False,
        max_answers: int = 8,
        transports: tuple[str, ...] = (),
        tls: ssl.SSLContext | None = None,
        audits: bool = False,
    ) -> None:
        self.tls = tls
        self.url = url.replace("http", "ws", 1) + "/v1/nodes/stream"
        self.key = Ed25519PrivateKey.generate()
        self.join = Join(
            name,
            incarnation,
            cluster,
            role,
            self.key.public_key().public_bytes_raw(),
            KvAddress("127.0.0.1", 7000) if kv else None,
            model,
            "0.1.0",
            max_queue,
            codecs,
            probes=probes,
            kv_events=kv_events,
            converts=converts,
            max_running=8,
            topology=topology,
            moves=moves,
            max_answers=max_answers,
            audits=audits,
            transports=transports,
        )
        self.token = token
        self.on_prefill = on_prefill or prefill_well
        self.on_generate = on_generate or answer_well
        self.on_share = on_share or share_well
        self.on_take = on_take or take_well
        self.speed = speed
        self.links: tuple[LinkReport, ...] = ()
        self.codec = "lossless"
        self.obeys = True
        """Whether it changes its role when told to."""
        self.prefilled: dict[str, int] = {}
        """Tokens that it says to have computed of a job, when that is cancelled."""
        self.orders: list[Any] = []
        self.cancelled: list[str] = []
        self.violations: list[str] = []
        self.welcome: Welcome | None = None
        self.refused: Refused | None = None
        self.beating = True
        self.beats = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._jobs: dict[str, asyncio.Task[None]] = {}

    @property
    def name(self) -> str:
        return self.join.node_id

    async def start(self) -> FakeNode:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.ws = await websockets.connect(
            self.url, additional_headers=headers, max_size=control.MAX_MESSAGE_BYTES, ssl=self.tls
        )
        await self.send(self.join)
        answer = control.decode_to_node(await self.ws.recv())
        if isinstance(answer, Refused):
            self.refused = answer
            await self.ws.close()
            return self
        assert isinstance(answer, Welcome)
        self.welcome = answer
        await self.heartbeat()
        self._spawn(self._beat())
        self._spawn(self._read())
        return self

    async def send(self, message: control.FromNode) -> None:
        await self.ws.send(control.encode(message))

    async def heartbeat(self, accepting: bool = True, **figures: Any) -> None:
        plain = {"queued_jobs": 0, "queued_tokens": 0, "running": 0, "pages_total": 100, "pages_free": 60}
        plain |= {"prefill_tokens_per_s": self.speed, "decode_tokens_per_s": 30.0, "open_transfers": 0} | figures
        plain["links"] = self.links
        await self.send(Heartbeat(accepting=accepting, **plain))

    async def stop(self) -> None:
        for task in (*self._tasks, *self._jobs.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._jobs.values(), return_exceptions=True)
        await self.ws.close()

    def abort(self) -> None:
        """Cut the connection as a killed process would."""
        self.ws.transport.abort()

    def jobs(self, kind: type[Any]) -> list[Any]:
        return [order for order in self.orders if isinstance(order, kind)]

    async def _beat(self) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await asyncio.sleep(0.2)
                if self.beating:
                    await self.heartbeat()

    async def _read(self) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            async for data in self.ws:
                message = control.decode_to_node(data)
                if isinstance(message, Beat):
                    self.beats += 1
                    continue
                self.orders.append(message)
                if not isinstance(message, RateLease):
                    self._obey(message)

    def _obey(self, order: Any) -> None:
        match order:
            case PrefillJob():
                ticket = self._check_ticket(order.ticket)
                self._check(ticket.prefill_node == self.name, "a ticket for another node")
                self._check(ticket.prefill_incarnation == self.join.incarnation, "a ticket for another incarnation")
                self._check(
                    ticket.stop == len(order.token_ids) - 1, "a range that is not the prompt less its last token"
                )
                self._check((order.dial is None) == (self.join.kv_address is not None), "the wrong side would dial")
                self._run(ticket.transfer.hex(), self.on_prefill(self, order))
            case GenerateJob():
                self._check(order.deadline > time.time(), "a deadline in the past")
                if order.source is not None:
                    ticket = self._check_ticket(order.source.ticket)
                    self._check(ticket.decode_key == self.join.public_key, "a ticket for another decode key")
                self._run(order.generation, self.on_generate(self, order))
            case SharePrefix():
                ticket = self._check_ticket(order.ticket)
                self._check(self.join.moves, "an order that this node does not know")
                self._check(ticket.prefill_node == self.name, "a ticket for another node")
                self._check(ticket.prefill_incarnation == self.join.incarnation, "a ticket for another incarnation")
                self._check(ticket.stop == len(order.token_ids), "tokens that are not those of the range")
                self._check((order.dial is None) == (self.join.kv_address is not None), "the wrong side would dial")
                self._run(ticket.transfer.hex(), self.on_share(self, order))
            case TakePrefix():
                ticket = self._check_ticket(order.source.ticket)
                self._check(self.join.moves, "an order that this node does not know")
                self._check(ticket.decode_key == self.join.public_key, "a ticket for another node's key")
                self._check(ticket.stop == len(order.token_ids), "tokens that are not those of the range")
                self._run(ticket.transfer.hex(), self.on_take(self, order))
            case Cancel():
                self.cancelled.append(order.job)
                self._spawn(self._cancel(order.job))
            case ChangeRole():
                self._check(order.incarnation == self.join.incarnation, "an order for another incarnation")
                self._check(order.epoch > self.join.role_epoch, "an epoch that does not rise")
                self._check(not any(not task.done() for task in self._jobs.values()), "converted with jobs at hand")
                role = order.role if self.obeys else self.join.role
                self.join = msgspec.structs.replace(self.join, role=role, role_epoch=order.epoch)
                cause = "" if self.obeys else "busy"
                self._spawn(self.send(RoleChanged(order.epoch, role, self.obeys, cause)))
            case AuditKv():
                self._check(self.join.audits, "an order that this node does not know")
            case Drain() | ProbeLink() | ReplayKvEvents() | CertificateIssued() | Siblings():
                pass
            case Refused():
                self.refused = order
            case _:
                self.violations.append(f"unexpected {order}")

    def _check_ticket(self, data: bytes) -> Any:
        assert self.welcome is not None
        return verify_ticket(data, self.welcome.ticket_key, time.time())

    def _check(self, fine: bool, what: str) -> None:
        if not fine:
            self.violations.append(what)

    def _run(self, job: str, script: Awaitable[None]) -> None:
        self._check(job not in self._jobs, f"job {job} was sent twice")
        self._jobs[job] = asyncio.ensure_future(script)

    async def _cancel(self, job: str) -> None:
        task = self._jobs.get(job)
        if task is not None:
            task.cancel()
        await self.send(Cancelled(job, self.prefilled.get(job, 0)))

    def _spawn(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def transfer_of(node: FakeNode, ticket: bytes) -> bytes:
    assert node.welcome is not None
    return verify_ticket(ticket, node.welcome.ticket_key, time.time()).transfer


async def prefill_well(node: FakeNode, job: PrefillJob) -> None:
    transfer = transfer_of(node, job.ticket)
    await node.send(PrefillStarted(transfer))
    await node.send(PrefillDone(transfer, 0.01, len(job.token_ids) - 1))


async def share_well(node: FakeNode, order: SharePrefix) -> None:
    """Who has sent all says nothing."""


async def take_well(node: FakeNode, order: TakePrefix) -> None:
    transfer = transfer_of(node, order.source.ticket)
    await node.send(TransferDone(transfer, RAW_BYTES, WIRE_BYTES, "raw", 0.02, 0.01, b"\x02" * 16))


async def never(node: FakeNode, job: Any) -> None:
    await asyncio.Event().wait()


async def receive_kv(node: FakeNode, job: GenerateJob) -> None:
    if job.source is None:
        return
    transfer = transfer_of(node, job.source.ticket)
    await node.send(TransferDone(transfer, RAW_BYTES, WIRE_BYTES, node.codec, 0.02, 0.01, b"\x01" * 16))


def delta(job: GenerateJob, token: int, text: str) -> Delta:
    logprobs = None
    if job.sampling.logprobs is not None:
        likeliest = [TokenLogprob(token, -0.5), TokenLogprob(400, -1.5), TokenLogprob(401, -2.5)]
        logprobs = ((TokenLogprob(token, -0.5), *likeliest[: job.sampling.logprobs]),)
    return Delta(job.generation, text, (token,), logprobs)


async def answer_well(node: FakeNode, job: GenerateJob) -> None:
    """Three tokens, or fewer where fewer were asked for."""
    await receive_kv(node, job)
    said = ANSWER[: job.sampling.max_tokens]
    for at, token in enumerate(said):
        for answer in range(job.answers):
            await node.send(msgspec.structs.replace(delta(job, token, f"t{at} "), answer=answer))
    if job.answers > 1:
        for answer in range(job.answers):
            await node.send(AnswerEnded(job.generation, answer, "stop"))
    await finish(node, job, tokens=len(said) * job.answers)


async def finish(node: FakeNode, job: GenerateJob, reason: str = "stop", tokens: int = len(ANSWER)) -> None:
    await node.send(Finished(job.generation, reason, len(job.token_ids), tokens, 0))


def failing(stage: str, cause: str) -> Script:
    async def script(node: FakeNode, job: Any) -> None:
        if isinstance(job, GenerateJob):
            name = job.generation
        else:
            name = transfer_of(node, job.source.ticket if isinstance(job, TakePrefix) else job.ticket).hex()
        await node.send(Failed(name, stage, cause, "scripted"))

    return script
