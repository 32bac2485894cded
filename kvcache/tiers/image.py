"""One block or snapshot as a tier holds it: what it is, and digests of its pages. As bytes it is a file's header.

A file is the header, padded to whole 4 KiB, and then the pages as they lie in the pool. The header names the
fingerprint of the model: pages of another one, or of another size, are never taken for ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvcache.blocks import PAGE_ALIGNMENT
from kvcache.digest import DIGEST_BYTES, kv_digest, piece_digest
from kvcache.kept import EntryKind, Provenance
from kvcache.quality import Quality

MAGIC = b"PRFAASKV"
VERSION = 1
MAX_HEADER_BYTES = 16 << 20
_FIXED = len(MAGIC) + 2 + 4 + DIGEST_BYTES

Buffer = bytes | bytearray | memoryview
Key = tuple[bytes, EntryKind]


class Damaged(Exception):
    """Bytes in a tier that are not what was written there."""


class Image(msgspec.Struct, frozen=True):
    """``digests`` are xxh3-128 of each page, one after another. The rest is as ``kvcache.kept`` has it.

    ``parent`` is the block before, of a snapshot the block at whose end it lies; b"" for the first block of a chain.
    """

    fingerprint: str
    page_bytes: int
    kind: EntryKind
    hash: bytes
    parent: bytes
    tokens: int
    quality: Quality
    codecs: tuple[str, ...]
    origin: str
    digests: bytes

    @property
    def key(self) -> Key:
        """Its name, and which of the two kinds it is."""
        return self.hash, self.kind

    @property
    def pages(self) -> int:
        """How many it has."""
        return len(self.digests) // DIGEST_BYTES

    @property
    def digest(self) -> bytes:
        """One value for all pages."""
        return kv_digest(self.digests)

    @property
    def provenance(self) -> Provenance:
        """Where its bytes come from."""
        return Provenance(self.quality, self.codecs, self.origin)


def draft(
    fingerprint: str, page_bytes: int, key: Key, parent: bytes, tokens: int, pages: int, provenance: Provenance
) -> Image:
    """An image whose digests are still to come; all else, and so its size, is that of the final one."""
    return Image(
        fingerprint,
        page_bytes,
        key[1],
        key[0],
        parent,
        tokens,
        provenance.quality,
        provenance.codecs,
        provenance.origin,
        bytes(DIGEST_BYTES * pages),
    )


def sealed(draft: Image, pages: Sequence[Buffer]) -> Image:
    """The image of these bytes."""
    return msgspec.structs.replace(draft, digests=b"".join(piece_digest([page]) for page in pages))


_decoder = msgspec.msgpack.Decoder(Image)


def check(pages: Sequence[Buffer], digest: bytes) -> None:
    """Raise Damaged unless these pages have this ``Image.digest``."""
    if kv_digest(b"".join(piece_digest([page]) for page in pages)) != digest:
        raise Damaged("pages: other bytes than were written")


def encode_header(image: Image) -> bytes:
    """The beginning of a file: a multiple of 4 KiB."""
    body = msgspec.msgpack.encode(image)
    head = MAGIC + VERSION.to_bytes(2, "big") + len(body).to_bytes(4, "big") + piece_digest([body]) + body
    return head.ljust(-(-len(head) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT, b"\0")


def header_bytes(begin: Buffer) -> int:
    """How long the header is that begins like this (4 KiB are enough). Raises Damaged."""
    head = bytes(begin[:_FIXED])
    if len(head) < _FIXED or head[: len(MAGIC)] != MAGIC:
        raise Damaged("header: not one of ours")
    at = len(MAGIC)
    if int.from_bytes(head[at : at + 2], "big") != VERSION:
        raise Damaged(f"header: version {int.from_bytes(head[at : at + 2], 'big')}, {VERSION} is known")
    size = int.from_bytes(head[at + 2 : at + 6], "big")
    if size > MAX_HEADER_BYTES:
        raise Damaged(f"header: {size} bytes")
    return -(-(_FIXED + size) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def decode_header(header: Buffer) -> Image:
    """Read what ``encode_header`` wrote. Raises Damaged."""
    if header_bytes(header) != len(header):
        raise Damaged("header: cut off")
    at = _FIXED - DIGEST_BYTES
    size = int.from_bytes(header[at - 4 : at], "big")
    body = bytes(header[_FIXED : _FIXED + size])
    if piece_digest([body]) != bytes(header[at:_FIXED]):
        raise Damaged("header: other bytes than were written")
    try:
        image = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Damaged(f"header: {error}") from error
    if not image.digests or len(image.digests) % DIGEST_BYTES:
        raise Damaged("header: no whole digests")
    return image
