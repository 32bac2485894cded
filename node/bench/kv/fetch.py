"""The fetching side: a decode client that fetches the same KV again and again, and looks at its watch."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcache import codecs
from kvcache.control import (
    Failed,
    Finished,
    FromNode,
    GenerateJob,
    KvAddress,
    KvSource,
    LinkReport,
    Sampling,
    TransferDone,
)
from kvcache.quality import Quality
from kvcache.ticket import Ticket, sign_ticket
from kvcache.transport import TCP, Expected, PeerUnreachable, TransportLimits
from kvcache.wire import Role
from node.bench.kv.credentials import Credentials
from node.bench.kv.party import Party

_LOOK_S = 0.01


class FetchFailed(Exception):
    """A transfer did not end in a commit; the text says why."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One committed transfer. ``seconds`` are from asking to the commit, ``cpu_s`` is this process's meanwhile.

    ``verified``: every piece's digest was compared and, where the codec is exact, the whole equals what is offered.
    """

    report: TransferDone
    seconds: float
    cpu_s: float
    verified: bool


class KvFetcher:
    """``connect``, then ``fetch`` as often as wanted, then ``close``.

    Raises UnknownCodec or CodecError for a codec that the offered KV cannot have.
    """

    def __init__(
        self,
        credentials: Credentials,
        address: KvAddress,
        codec: str,
        connections: int,
        context: ssl.SSLContext | None,
        *,
        trusted_network: bool,
        transport: str = TCP,
    ) -> None:
        chosen = codecs.set_by_name(codec)
        chosen.check(credentials.subject.layout)
        self._exact = all(codecs.by_name(name).exact for name in chosen.members)
        self._quality = next(quality for quality in Quality if chosen.members.issubset(quality.codecs))
        self._codec = codec
        self._transport = transport
        self._offered = credentials
        self._key = Ed25519PrivateKey.from_private_bytes(credentials.key)
        self._address = address
        self._connections = connections
        self._ends: dict[str, asyncio.Future[Finished]] = {}
        self._commits: dict[bytes, tuple[TransferDone, float, float]] = {}
        self._party = Party(
            Role.DECODE,
            credentials.subject,
            self._key.public_key().public_bytes_raw(),
            self._note,
            dial_ssl=context,
            limits=TransportLimits(connections=connections),
            trusted_network=trusted_network,
            nixl=transport == "nixl",
        )

    async def connect(self, within_s: float) -> LinkReport:
        """Set up and prove every connection. Raises PeerRefused, PeerUnreachable."""
        loop, server = asyncio.get_running_loop(), self._offered
        deadline = loop.time() + within_s
        expected = Expected(server.node_id, server.incarnation, server.public_key)
        await self._party.endpoint.peer(expected, self._address, deadline)
        while (link := self.link()).connections != self._connections:
            if loop.time() > deadline:
                raise PeerUnreachable(
                    f"{link.connections} of {self._connections} connections were made within {within_s:.0f} s"
                )
            await asyncio.sleep(_LOOK_S)
        return link

    async def fetch(self, within_s: float) -> Fetched:
        """One transfer. Raises FetchFailed, also where something else than the transport asked for carried it."""
        offered, subject, now = self._offered, self._offered.subject, time.time()
        ticket = Ticket(
            transfer=os.urandom(16),
            request_id=f"{self._transport} {self._codec}",
            attempt=1,
            prefill_node=offered.node_id,
            prefill_incarnation=offered.incarnation,
            decode_key=self._party.identity.public_key,
            fingerprint=subject.fingerprint,
            start=0,
            stop=subject.tokens,
            chunk_tokens=subject.chunk_tokens,
            byte_cap=subject.nbytes,
            issued=now,
            deadline=now + within_s,
        )
        signed = sign_ticket(ticket, self._key)
        source = KvSource(
            signed, offered.node_id, offered.incarnation, offered.public_key, self._address, self._quality
        )
        job, prompt = ticket.transfer.hex(), (0,) * (subject.tokens + 1)
        end = self._ends[job] = asyncio.get_running_loop().create_future()
        began, cpu_began = time.perf_counter(), time.process_time()
        self._party.asking.accept(GenerateJob(job, prompt, Sampling(max_tokens=1), source, ticket.deadline))
        try:
            await end
        finally:
            del self._ends[job]
        await self._party.asking.settled()
        report, ended, cpu_ended = self._commits.pop(ticket.transfer)
        if report.transport != self._transport:
            raise FetchFailed(f"{self._transport}: not had between these two processes, {report.transport} carried it")
        whole = report.raw_bytes == subject.nbytes
        verified = whole and (not self._exact or report.kv_digest == offered.kv_digest)
        return Fetched(report, ended - began, cpu_ended - cpu_began, verified)

    def link(self) -> LinkReport:
        """The figures of all connections so far. Raises PeerUnreachable where the server is lost."""
        links = self._party.endpoint.links()
        if not links:
            raise PeerUnreachable("the server is lost")
        return links[0]

    async def close(self) -> None:
        """End everything."""
        await self._party.close()

    def _note(self, message: FromNode) -> None:
        match message:
            case TransferDone():
                self._commits[message.transfer] = (message, time.perf_counter(), time.process_time())
            case Finished(generation=job):
                self._ends[job].set_result(message)
            case Failed(job=job):
                self._ends[job].set_exception(FetchFailed(f"{message.cause}: {message.detail}"))
