"""Memory for encoded payloads on their way to a decoder: bounded per peer by not reading from it for a while."""

from __future__ import annotations

from kvcache.transport import Peer


class Scratch:
    """Counts what each peer's arrived payloads take; above the limit it is not read from until half of it is free.

    Only whole payloads count: one that is still arriving would never do so if it stopped the reading.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Peer, int] = {}
        self._paused: set[Peer] = set()

    def hold(self, peer: Peer, nbytes: int) -> None:
        """A payload of this peer has arrived and waits to be decoded."""
        self._held[peer] = self._held.get(peer, 0) + nbytes
        if self._held[peer] > self._limit and peer not in self._paused:
            self._paused.add(peer)
            peer.pause()

    def drop(self, peer: Peer, nbytes: int) -> None:
        """It is decoded, or no longer wanted."""
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
