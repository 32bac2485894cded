"""Names of a prompt's blocks, without hashing again what an earlier prompt began with.

A conversation comes back longer at each turn, and hashing 128K tokens takes milliseconds. Kept are stretches of 64
blocks: the name before the stretch and its tokens lead to its names. The tokens are compared, byte by byte, so a name
is never that of another prompt; the quick hash of a stretch only says where to look.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from xxhash import xxh3_64_intdigest

from kvcache.hashing import HASH_BYTES, TOKEN_BYTES, chain_root, packed, packed_hashes

STRETCH_BLOCKS = 64
DEFAULT_BYTES = 64 << 20
_NAME_BYTES = 64  # what one costs as an object, with its place in a tuple


class ChainCache:
    """The least recently used stretches go when they take more than ``capacity_bytes``. Safe to use from threads."""

    def __init__(self, capacity_bytes: int = DEFAULT_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._kept: OrderedDict[tuple[bytes, int], tuple[bytes, tuple[bytes, ...]]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """About what the kept stretches take."""
        return self._bytes

    def block_hashes(
        self, token_ids: Sequence[int], block_tokens: int, *, fingerprint: str, salt: str, lora: str = ""
    ) -> list[bytes]:
        """As ``kvcache.hashing.block_hashes``, which says what is raised."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        key = chain_root(fingerprint, salt=salt, lora=lora)
        tokens = packed(token_ids)
        stretch = STRETCH_BLOCKS * block_tokens * TOKEN_BYTES
        whole = len(tokens) - len(tokens) % stretch
        names: list[bytes] = []
        for begin in range(0, whole, stretch):
            names += self._stretch(key, bytes(tokens[begin : begin + stretch]), block_tokens)
            key = names[-1]
        return names + packed_hashes(key, tokens[whole:], block_tokens)

    def _stretch(self, key: bytes, tokens: bytes, block_tokens: int) -> Sequence[bytes]:
        place = key, xxh3_64_intdigest(tokens)
        with self._lock:
            found = self._kept.get(place)
            if found is not None and found[0] == tokens:
                self._kept.move_to_end(place)
                return found[1]
        names = tuple(packed_hashes(key, tokens, block_tokens))
        size = len(tokens) + len(names) * (_NAME_BYTES + HASH_BYTES)
        with self._lock:
            if place not in self._kept:
                self._bytes += size
            self._kept[place] = tokens, names
            while self._bytes > self._capacity_bytes:
                _, (old, gone) = self._kept.popitem(last=False)
                self._bytes -= len(old) + len(gone) * (_NAME_BYTES + HASH_BYTES)
        return names
