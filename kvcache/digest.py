"""Digests of KV bytes: xxh3-128, fast enough to run over everything that moves. They find damage, not forgery."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

DIGEST_BYTES = 16


def piece_digest(views: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """xxh3-128 (16 bytes, big-endian) of the views' bytes, one after another; how they are split does not matter."""
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.digest()


def wire_digest(
    exact: bool,
    raw: Sequence[bytes | bytearray | memoryview],
    encoded: Sequence[bytes | bytearray | memoryview],
) -> bytes:
    """What a Data frame carries: the digest of the raw bytes where the codec is ``exact``, else of the encoded ones.

    An inexact codec's raw bytes differ at the two ends, and nothing but the encoded ones can be compared.
    """
    return piece_digest(raw if exact else encoded)


def kv_digest(digests: bytes) -> bytes:
    """xxh3-128 over all piece digests in plan order: one value for a whole transfer.

    Raises ValueError unless ``digests`` is whole digests of 16 bytes.
    """
    if len(digests) % DIGEST_BYTES:
        raise ValueError(f"digests: {len(digests)} bytes are no multiple of {DIGEST_BYTES}")
    return xxhash.xxh3_128_digest(digests)
