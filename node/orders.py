"""What gateways order a node to do, and who hears what comes of it: each gateway of its own jobs, and of no others."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from decode_client.auditing import KvAuditor
from kvcache.control import (
    Cancel,
    Cancelled,
    ChangeRole,
    Delta,
    Drain,
    Failed,
    Finished,
    FromNode,
    GenerateJob,
    Heartbeat,
    Join,
    KvSource,
    Order,
    PrefillJob,
    PrefillStarted,
    ProbeLink,
    RateLease,
    ReplayKvEvents,
    SharePrefix,
    TakePrefix,
    Welcome,
)
from kvcache.control.audits import AuditKv
from kvcache.control.renewal import CertificateIssued
from kvcache.ticket import claimed_transfer
from kvcache.transport import KvEndpoint
from node.credentials import Credentials
from node.event_feed import EventFeeds
from node.gateways import Gateways
from node.presence import Presence
from node.ranks import Ranks
from node.rates import Rates
from node.readiness import Readiness
from node.roles import NodeRole
from node.sides import Sides


class Orders:
    """The handler of a node's control streams, which are ``gateways``."""

    def __init__(
        self,
        presence: Presence,
        readiness: Readiness,
        role: NodeRole,
        sides: Sides,
        auditor: KvAuditor,
        feeds: EventFeeds,
        endpoint: KvEndpoint,
        credentials: Credentials,
        rates: Rates,
        gateways: Callable[[], Gateways],
    ) -> None:
        self._presence = presence
        self._readiness = readiness
        self._role = role
        self._sides = sides
        self._auditor = auditor
        self._feeds = feeds
        self._endpoint = endpoint
        self._credentials = credentials
        self._rates = rates
        self._gateways = gateways
        self._prefill_ranks, self._speech_ranks = Ranks(), Ranks()

    def join(self) -> Join:
        """As ``Presence.join``."""
        return self._presence.join()

    def heartbeat(self, gateway: str) -> Heartbeat:
        """As ``Presence.heartbeat``."""
        return self._presence.heartbeat(gateway)

    def on_welcome(self, gateway: str, welcome: Welcome) -> None:
        """Trust this gateway's tickets, for its own jobs."""
        self._sides.trust(welcome.ticket_key, gateway, lambda message: self._report(gateway, message))
        self._presence.accepted(gateway)

    def on_order(self, gateway: str, order: Order) -> None:
        """Do what a gateway says."""
        match order:
            case Cancel(job=job):
                if not self._sides.cancel(job):
                    self._report(gateway, Cancelled(job))
            case Drain():
                self._readiness.draining = True
                self._gateways().beat_now()
            case ChangeRole():
                self._role.order(order, gateway)
            case RateLease(egress_bytes_per_s=rate):
                self._endpoint.pace(rate)
            case CertificateIssued():
                self._credentials.issued(order)
            case ReplayKvEvents(start_seq=start_seq):
                self._feeds.replay(gateway, start_seq)
            case ProbeLink(peer_node=peer, nbytes=nbytes):
                self._endpoint.probe(peer, nbytes, self._gateways().beat_now)
            case AuditKv():
                self._auditor.audit(order, lambda told: self._report(gateway, told))
            case PrefillJob(ticket=ticket, priority=rank) if not self._readiness.refusing:
                here = self._prefill_ranks.of(gateway, _job(ticket), rank)
                self._sides.serving.accept(msgspec.structs.replace(order, priority=here), gateway)
                self._gateways().beat_soon()
            case SharePrefix() if not self._readiness.refusing:
                self._sides.serving.accept(order, gateway)
            case GenerateJob(generation=generation, priority=rank) if not self._readiness.refusing:
                here = self._speech_ranks.of(gateway, generation, rank)
                self._sides.asking.accept(msgspec.structs.replace(order, priority=here), gateway)
                self._gateways().beat_soon()
            case TakePrefix() if not self._readiness.refusing:
                self._sides.asking.take(order, gateway)
            case PrefillJob(ticket=ticket) | SharePrefix(ticket=ticket) | TakePrefix(source=KvSource(ticket=ticket)):
                self._turn_away(gateway, _job(ticket))
            case GenerateJob(generation=generation):
                self._turn_away(gateway, generation)

    def on_disconnected(self, gateway: str, cause: str) -> None:
        """Without its gateway no job has anybody to answer to; those of other gateways go on."""
        self._feeds.stop(gateway)
        self._role.lost(gateway)
        self._prefill_ranks.left(gateway)
        self._speech_ranks.left(gateway)
        self._sides.leave(gateway, "gateway_lost", cause)
        self._gateways().beat_soon()

    def _turn_away(self, gateway: str, job: str) -> None:
        self._report(gateway, Failed(job, "queue", self._readiness.leaving, "takes no new jobs"))

    def _report(self, gateway: str, message: FromNode) -> None:
        self._rates.observe(message)
        self._gateways().send(gateway, message)
        match message:
            case PrefillStarted(transfer=transfer):
                self._prefill_ranks.began(transfer.hex())
            case Delta(generation=generation):
                self._speech_ranks.began(generation)
            case Finished(generation=job) | Failed(job=job) | Cancelled(job=job):
                self._prefill_ranks.ended(job)
                self._speech_ranks.ended(job)
                self._gateways().beat_soon()


def _job(ticket: bytes) -> str:
    """What the job of a ticket is called, whoever signed it."""
    return (claimed_transfer(ticket) or b"").hex()
