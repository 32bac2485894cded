"""Which side of the node a KV frame is for. A node may serve one transfer and ask for another over one connection."""

from __future__ import annotations

from collections.abc import Sequence

from decode_client.client import DecodeClient
from kvcache.transport import Connection, Peer
from kvcache.wire import Abort, Ack, Announce, Data, Grant, Manifest, Open
from prefill_service.service import PrefillService


class FrameRouter:
    """The node's ``FrameHandler``: each side finds the transfer among its own, or ignores the frame."""

    def __init__(self, serving: PrefillService, asking: DecodeClient) -> None:
        self._serving = serving
        self._asking = asking

    def on_frame(self, peer: Peer, frame: Open | Announce | Grant | Manifest | Ack | Abort) -> None:
        """Hand a frame to the side that it speaks to; an Abort may concern either."""
        match frame:
            case Open() | Grant() | Ack():
                self._serving.on_frame(peer, frame)
            case Announce() | Manifest():
                self._asking.on_frame(peer, frame)
            case Abort():
                self._serving.on_frame(peer, frame)
                self._asking.on_frame(peer, frame)

    def payload_target(self, peer: Peer, data: Data) -> Sequence[memoryview] | None:
        """Where a payload goes."""
        return self._asking.payload_target(peer, data)

    def on_data(self, peer: Peer, data: Data) -> None:
        """A payload is there."""
        self._asking.on_data(peer, data)

    def on_broken(self, peer: Peer, connection: Connection, unfinished: Data | None) -> None:
        """Both sides may have sent over this connection."""
        self._serving.on_broken(peer, connection)
        self._asking.on_broken(peer, unfinished)

    def on_lost(self, peer: Peer, cause: str) -> None:
        """Both sides may have used this peer."""
        self._serving.on_lost(peer, cause)
        self._asking.on_lost(peer, cause)
