"""The serving side: a prefill service that takes its orders from whoever shows a ticket of this run.

In a deployment the gateway orders a prefill and signs the ticket that fetches it. Here the fetching side signs, with
the key in the credentials, and the first Open with a ticket is its order too: ``request_id`` names the transport and
the codec.
"""

from __future__ import annotations

import logging
import ssl
import time

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from decode_client.client import DecodeClient
from kvcache.control import Failed, FromNode, PrefillJob
from kvcache.plan import plan_transfer
from kvcache.ticket import TicketError, verify_ticket
from kvcache.transport import Peer
from kvcache.wire import Abort, Ack, Announce, Grant, Manifest, Open, Role
from node.bench.kv.capture import Offer
from node.bench.kv.credentials import Credentials, Tls
from node.bench.kv.party import Party, Subject
from node.bench.kv.recording import CHUNK_TOKENS, digest_of, tokens_within
from node.router import FrameRouter
from prefill_service.service import PrefillService

log = logging.getLogger(__name__)

TRANSFERS_AT_ONCE = 2


class KvServer:
    """Offers the longest recorded cache of at most ``nbytes``. Raises ValueError where one token's is larger."""

    def __init__(self, offer: Offer, nbytes: int, *, trusted_network: bool, nixl: bool = False) -> None:
        layout = offer.recording.layout
        self.subject = Subject(layout, offer.fingerprint, tokens_within(layout, nbytes), CHUNK_TOKENS)
        self._source = offer.source
        self._key = Ed25519PrivateKey.generate()
        ticket_key = self._key.public_key().public_bytes_raw()
        self._party = Party(
            Role.PREFILL,
            self.subject,
            ticket_key,
            _log_failure,
            transfers_at_once=TRANSFERS_AT_ONCE,
            recording=offer.recording,
            frames=lambda serving, asking: _Orders(serving, asking, ticket_key, self.subject.tokens),
            trusted_network=trusted_network,
            nixl=nixl,
        )
        plan = plan_transfer(layout, 0, self.subject.tokens, CHUNK_TOKENS)
        table = self.subject.geometry.table(0, self.subject.tokens, range(self.subject.pages))
        offer.recording.write(plan, table, self._party.pool)
        self._digest = digest_of(plan, table, self._party.pool)

    def credentials(self, tls: Tls | None) -> Credentials:
        """What the fetching side needs."""
        identity = self._party.identity
        return Credentials(
            key=self._key.private_bytes_raw(),
            node_id=identity.node_id,
            incarnation=identity.incarnation,
            public_key=identity.public_key,
            subject=self.subject,
            source=self._source,
            kv_digest=self._digest,
            tls=tls,
        )

    async def listen(self, host: str, port: int, context: ssl.SSLContext | None) -> int:
        """The port that was bound. Raises OSError, InsecureBind."""
        return await self._party.endpoint.listen(host, port, context)

    async def close(self) -> None:
        """End every transfer and give the memory back."""
        await self._party.close()


class _Orders(FrameRouter):
    """An Open of a new transfer orders it first. What is wrong with a ticket, the service says."""

    def __init__(self, serving: PrefillService, asking: DecodeClient, ticket_key: bytes, tokens: int) -> None:
        super().__init__(serving, asking)
        self._service = serving
        self._ticket_key = ticket_key
        self._token_ids = (0,) * tokens

    def on_frame(self, peer: Peer, frame: Open | Announce | Grant | Manifest | Ack | Abort) -> None:
        """Be the gateway, then the node."""
        if isinstance(frame, Open):
            try:
                ticket = verify_ticket(frame.ticket, self._ticket_key, time.time())
            except TicketError as error:
                log.info("no order peer=%s reason=%r", peer.identity.node_id, str(error))
            else:
                transport, _, codec = ticket.request_id.partition(" ")
                self._service.accept(PrefillJob(frame.ticket, self._token_ids, codec, transports=(transport,)))
        super().on_frame(peer, frame)


def _log_failure(message: FromNode) -> None:
    if isinstance(message, Failed):
        log.warning("transfer=%s failed cause=%s detail=%r", message.job, message.cause, message.detail)
