"""KV between nodes over TCP, with or without TLS: several connections for each pair of nodes."""

from __future__ import annotations

from kvcache.session import Expected, PeerIdentity, PeerRefused
from kvcache.transport.connection import Connection
from kvcache.transport.endpoint import InsecureBind, KvEndpoint
from kvcache.transport.interface import FrameHandler, LocalIdentity, PeerLost, PeerUnreachable, TransportLimits
from kvcache.transport.peer import Peer
from kvcache.transport.sendqueue import Outgoing

__all__ = [
    "Connection",
    "Expected",
    "FrameHandler",
    "InsecureBind",
    "KvEndpoint",
    "LocalIdentity",
    "Outgoing",
    "Peer",
    "PeerIdentity",
    "PeerLost",
    "PeerRefused",
    "PeerUnreachable",
    "TransportLimits",
]
