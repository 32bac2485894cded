"""What a user of the transport gives to it and gets from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcache.session import PeerIdentity
from kvcache.wire import Abort, Ack, Announce, Data, Grant, Lane, Manifest, Open, Role

if TYPE_CHECKING:
    from kvcache.transport.connection import Connection
    from kvcache.transport.peer import Peer

TransferFrame = Open | Announce | Grant | Manifest | Ack | Abort
PeerFrame = TransferFrame | Lane


class PeerLost(ConnectionError):
    """This peer is lost; the text says why."""


class PeerUnreachable(ConnectionError):
    """No connection came about before the deadline; the text says what failed last."""


@dataclass(frozen=True, slots=True)
class LocalIdentity:
    """This node. ``role`` is asked at each handshake, for it may change while the node runs."""

    node_id: str
    incarnation: str
    key: Ed25519PrivateKey
    fingerprint: str
    role: Callable[[], Role]

    def as_peer(self) -> PeerIdentity:
        """What others will see."""
        public_key = self.key.public_key().public_bytes_raw()
        return PeerIdentity(self.node_id, self.incarnation, self.role(), public_key, self.fingerprint)


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Bounds and times, in seconds and bytes."""

    ping_every_s: float = 1.0
    lost_after_s: float = 4.0
    """A connection over which nothing came for this long is lost."""
    resume_s: float = 4.5
    """A peer that cannot be heard over any connection for this long is lost."""
    connections: int = 4
    """How many the node that dials keeps to each peer."""
    max_connections: int = 16
    """How many are accepted from one peer."""
    max_lanes: int = 8
    """How many of one peer, of all transports and both sides' making."""
    max_lane_greetings: int = 16
    connect_s: float = 4.0
    """One attempt to reach one address."""
    handshake_s: float = 5.0
    """TLS and Hello to Proof together, on either side."""
    backoff_first_s: float = 0.05
    backoff_most_s: float = 2.0
    max_greetings: int = 256
    """Inbound connections that have not yet proved who they are; beyond it the oldest is closed."""
    max_dials: int = 256
    max_peers: int = 1024
    control_backlog: int = 4 << 20
    """Unsent control bytes for one peer; beyond it the peer is closed."""
    socket_buffer: int = 4 << 20
    unsent_in_kernel: int = 1 << 20
    """Bytes that wait in the kernel before their first transmission: what a control frame may queue behind."""


class FrameHandler(Protocol):
    """The user's side of every peer. All calls come on the event loop, one at a time, and must not block it."""

    def on_frame(self, peer: Peer, frame: TransferFrame) -> None:
        """A control frame has come. An Abort also reports, with reason ``violation``, a transfer of this peer's that
        ``payload_target``, ``on_data`` or ``on_frame`` refused with TransferViolation: the peer was told the same.
        """

    def payload_target(self, peer: Peer, data: Data) -> Sequence[memoryview] | None:
        """Where the payload of ``data`` goes: exactly ``wire_bytes`` of writable memory, or None to drop it.

        Several may be under way at once, in any order, each over another connection. The transport writes there until
        ``on_data`` is called, ``on_broken`` names it, ``on_lost`` is called, or ``peer.drop_payload`` returns. Raises
        TransferViolation for a header that breaks the plan: the payload is dropped.
        """

    def on_data(self, peer: Peer, data: Data) -> None:
        """The payload lies in its target; the transport no longer refers to that memory."""

    def on_broken(self, peer: Peer, connection: Connection, unfinished: Data | None) -> None:
        """A connection is over and the peer is not lost: what was sent over it may not have arrived, so whatever the
        other side has not acknowledged must be sent again. The payload of ``unfinished`` will not arrive.
        """

    def on_lost(self, peer: Peer, cause: str) -> None:
        """The peer is lost, whoever ended it. Called exactly once, last of all, from the loop itself."""
