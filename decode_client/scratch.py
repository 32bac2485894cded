"""Memory for encoded payloads on their way to a decoder: bounded per peer by not reading from it for a while."""

from __future__ import annotations

from kvcache.transport import Peer


class Scratch:
    """Counts what each peer's payloads take; above the limit that peer is not read from until half of it is free."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Peer, int] = {}
        self._paused: set[Peer] = set()

    def take(self, peer: Peer, nbytes: int) -> memoryview:
        """Memory for one payload. It is always given: what the peer has begun to send must land somewhere."""
        self._held[peer] = self._held.get(peer, 0) + nbytes
        if self._held[peer] > self._limit and peer not in self._paused:
            self._paused.add(peer)
            peer.pause()
        return memoryview(bytearray(nbytes))

    def give(self, peer: Peer, nbytes: int) -> None:
        """The payload is decoded or dropped."""
        self._held[peer] -= nbytes
        if self._held[peer] <= self._limit // 2 and peer in self._paused:
            self._paused.remove(peer)
            peer.resume()
        if not self._held[peer]:
            del self._held[peer]

    @property
    def held_bytes(self) -> int:
        """What all peers' payloads take at present."""
        return sum(self._held.values())
