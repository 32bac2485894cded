"""KV between nodes over TCP, with or without TLS: one shared connection for each pair of nodes."""

from __future__ import annotations

from kvcache.session import Expected, PeerIdentity, PeerRefused
from kvcache.transport.endpoint import InsecureBind, KvEndpoint
from kvcache.transport.interface import FrameHandler, LocalIdentity, PeerLost, PeerUnreachable, TransportLimits
from kvcache.transport.peer import Peer

__all__ = [
    "Expected",
    "FrameHandler",
    "InsecureBind",
    "KvEndpoint",
    "LocalIdentity",
    "Peer",
    "PeerIdentity",
    "PeerLost",
    "PeerRefused",
    "PeerUnreachable",
    "TransportLimits",
]
