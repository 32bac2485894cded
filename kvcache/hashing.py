"""Names of prompt blocks: a chain of keyed hashes in which each block's hash also covers all before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from sys import byteorder

HASH_BYTES = 16
TOKEN_BYTES = 4


def block_hashes(
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    fingerprint: str,
    salt: str,
    lora: str = "",
    extras: Sequence[bytes] = (),
) -> list[bytes]:
    """BLAKE2b-128 of every full block of ``token_ids``, each keyed by its predecessor.

    The chain starts from a key made of the fingerprint, the LoRA's name, multimodal extras and the salt (by default
    the tenant), so that equal blocks of different tenants or models have unrelated names. A trailing partial block has
    none. Raises ValueError for a block size below 1 and for ids outside 32 unsigned bits.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    root = chain_root(fingerprint, salt=salt, lora=lora, extras=extras)
    return packed_hashes(root, packed(token_ids), block_tokens)


def chain_root(fingerprint: str, *, salt: str, lora: str = "", extras: Sequence[bytes] = ()) -> bytes:
    """The key of a prompt's first block. Each part goes in with its length: no two lists of parts read alike."""
    state = blake2b(digest_size=HASH_BYTES, person=b"prfaas-blocks-1")
    for part in (fingerprint.encode(), lora.encode(), *extras, salt.encode()):
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


def more_hashes(last: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Hashes of the full blocks of ``token_ids`` that follow the block named ``last``. Raises as ``block_hashes``."""
    return packed_hashes(last, packed(token_ids), block_tokens)


def packed(token_ids: Sequence[int]) -> memoryview:
    """Token ids as they are hashed, four bytes each, little-endian. Raises ValueError for ids outside 32 bits."""
    try:
        ids = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token_ids: {error}") from error
    assert ids.itemsize == TOKEN_BYTES
    if byteorder == "big":
        ids.byteswap()
    return memoryview(ids).cast("B")


def packed_hashes(key: bytes, tokens: bytes | memoryview, block_tokens: int) -> list[bytes]:
    """Hashes of the full blocks of packed ``tokens`` that follow the block, or the root, named ``key``."""
    step = block_tokens * TOKEN_BYTES
    hashes = []
    for begin in range(0, len(tokens) - step + 1, step):
        key = blake2b(tokens[begin : begin + step], digest_size=HASH_BYTES, key=key).digest()
        hashes.append(key)
    return hashes
