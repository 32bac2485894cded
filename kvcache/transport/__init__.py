"""KV between nodes over TCP, with or without TLS: several connections for each pair of nodes, and lanes beside them."""

from __future__ import annotations

from kvcache.session import Expected, PeerIdentity, PeerRefused
from kvcache.transport.channel import TCP
from kvcache.transport.connection import Connection
from kvcache.transport.endpoint import InsecureBind, KvEndpoint
from kvcache.transport.interface import FrameHandler, LocalIdentity, PeerLost, PeerUnreachable, TransportLimits
from kvcache.transport.lanes import Carrier, LaneFailed
from kvcache.transport.peer import Peer
from kvcache.transport.sendqueue import Outgoing

__all__ = [
    "TCP",
    "Carrier",
    "Connection",
    "Expected",
    "FrameHandler",
    "InsecureBind",
    "KvEndpoint",
    "LaneFailed",
    "LocalIdentity",
    "Outgoing",
    "Peer",
    "PeerIdentity",
    "PeerLost",
    "PeerRefused",
    "PeerUnreachable",
    "TransportLimits",
]
