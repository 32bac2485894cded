"""The KV wire's frames. Sans-I/O: this module knows bytes, not sockets.

Every frame is ``length:u32 version:u8 kind:u8 head:u16`` (big-endian; length counts what follows the eight bytes) and
a body. All bodies are msgpack arrays of the structs below, so a newer peer may append fields and an older one may leave
them out: that is how versions N and N-1 talk. A Data body is its struct, ``head`` bytes of it, and then ``wire_bytes``
of payload; in every other frame ``head`` is 0.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

WIRE_VERSION = 1
OLDEST_WIRE_VERSION = 1

HEADER_BYTES = 8
MAX_HANDSHAKE_BODY = 4 << 10
MAX_CONTROL_BODY = 1 << 20
MAX_DATA_HEAD = 4 << 10
MAX_PAYLOAD_BYTES = 1 << 30
DIGEST_BYTES = 16

header = struct.Struct(">IBBH")


class Kind(IntEnum):
    """The frame's kind byte. Numbers are for ever."""

    HELLO = 1
    PROOF = 2
    OPEN = 3
    ANNOUNCE = 4
    GRANT = 5
    DATA = 6
    MANIFEST = 7
    ACK = 8
    ABORT = 9
    PING = 10
    PONG = 11
    LANE = 12


class Role(IntEnum):
    """What a node does at present; a role never depends on who dialled."""

    PREFILL = 1
    DECODE = 2


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of each side. ``nonce`` is what the other side signs in its Proof."""

    version: int
    oldest_version: int
    node_id: str
    incarnation: str
    role: Role
    public_key: bytes
    nonce: bytes
    fingerprint: str


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """Ed25519 over both Hellos as sent: proves that this node holds the key it named."""

    signature: bytes


class Open(msgspec.Struct, frozen=True, array_like=True):
    """Decode -> prefill: claim (or, after a lost connection, attach to) the transfer that a ticket permits.

    ``early_bytes`` is how many raw bytes may come before the Grant, over connections that the Announce came over first.
    """

    ticket: bytes
    codecs: tuple[str, ...]
    resume_from: int = 0
    early_bytes: int = 0


class Announce(msgspec.Struct, frozen=True, array_like=True):
    """Prefill -> decode: the job has room and starts now. The receiver checks each figure against its own plan."""

    transfer: bytes
    pieces: int
    raw_bytes: int
    codec: str


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Decode -> prefill: room is there for the whole transfer.

    ``missed`` are the pieces that came before there was, and were thrown away: they must be sent again.
    """

    transfer: bytes
    missed: tuple[int, ...] = ()


class Data(msgspec.Struct, frozen=True, array_like=True):
    """One piece; the payload of ``wire_bytes`` follows. All but seq, codec, wire_bytes and digest must equal the plan.

    ``digest`` is xxh3-128 of the raw bytes in canonical order for an exact codec, of the encoded bytes otherwise.
    """

    transfer: bytes
    seq: int
    group: int
    layer: int
    tensor: int
    start: int
    stop: int
    dtype: str
    codec: str
    raw_bytes: int
    wire_bytes: int
    digest: bytes


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """Prefill -> decode, after the last piece: every piece's digest, in plan order, 16 bytes each.

    ``computed_after_s`` is the time from the Grant's arrival to the end of the last chunk's computation; it is negative
    where that came first. Where this frame leaves before the Grant comes (``granted`` False), it is the time from the
    Announce's leaving. This frame itself may wait behind the data for long: nothing follows from when it arrives.

    ``transport`` is what carried the pieces at last, and ``failed`` what was tried before. When the last chunk was
    computed, pieces of ``backlog`` raw bytes were not acknowledged.
    """

    transfer: bytes
    digests: bytes
    computed_after_s: float
    granted: bool = True
    transport: str = "tcp"
    failed: tuple[str, ...] = ()
    backlog: int = 0


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """Decode -> prefill, cumulative, repeatable: all pieces below ``next_seq`` are verified; ``committed`` at last."""

    transfer: bytes
    next_seq: int
    committed: bool = False


class Abort(msgspec.Struct, frozen=True, array_like=True):
    """Either way: this transfer is over, nothing of it may be used."""

    transfer: bytes
    reason: str
    detail: str = ""


class Ping(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a Pong with the same token, once all of it has come: ``padding`` makes it a measure of the path."""

    token: int
    padding: bytes = b""


class Pong(msgspec.Struct, frozen=True, array_like=True):
    """Answers a Ping."""

    token: int


class Lane(msgspec.Struct, frozen=True, array_like=True):
    """Either way: where this side can be reached by another transport than TCP, as that transport writes it.

    Only for peers of which the gateway says that they have it.
    """

    transport: str
    offer: bytes


Frame = Hello | Proof | Open | Announce | Grant | Data | Manifest | Ack | Abort | Ping | Pong | Lane
"""Any frame."""

type_of_kind: dict[Kind, type[Frame]] = {
    Kind.HELLO: Hello,
    Kind.PROOF: Proof,
    Kind.OPEN: Open,
    Kind.ANNOUNCE: Announce,
    Kind.GRANT: Grant,
    Kind.DATA: Data,
    Kind.MANIFEST: Manifest,
    Kind.ACK: Ack,
    Kind.ABORT: Abort,
    Kind.PING: Ping,
    Kind.PONG: Pong,
    Kind.LANE: Lane,
}

_kind_of_type = {frame_type: kind for kind, frame_type in type_of_kind.items()}
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Kind, msgspec.msgpack.Decoder[Frame]] = {
    kind: msgspec.msgpack.Decoder(frame_type) for kind, frame_type in type_of_kind.items()
}


class WireError(ValueError):
    """Bytes that are no frame of ours; the connection that carried them is closed. ``field`` names what is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"frame {field}: {reason}")
        self.field = field
        self.reason = reason


def encode_frame(frame: Frame, version: int = WIRE_VERSION) -> bytes:
    """One frame as bytes; of a Data frame all but the payload, which must follow at once.

    Raises ValueError for a frame larger than a receiver reads.
    """
    kind = _kind_of_type[type(frame)]
    body = _encoder.encode(frame)
    if isinstance(frame, Data):
        if len(body) > MAX_DATA_HEAD:
            raise ValueError(f"Data header of {len(body)} bytes, at most {MAX_DATA_HEAD} are read")
        if not 0 <= frame.wire_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"wire_bytes {frame.wire_bytes} lies outside [0, {MAX_PAYLOAD_BYTES}]")
        return header.pack(len(body) + frame.wire_bytes, version, kind, len(body)) + body
    limit = MAX_HANDSHAKE_BODY if isinstance(frame, Hello | Proof) else MAX_CONTROL_BODY
    if len(body) > limit:
        raise ValueError(f"{type(frame).__name__} of {len(body)} bytes, at most {limit} are read")
    return header.pack(len(body), version, kind, 0) + body


def decode_body(kind: Kind, body: bytes | bytearray | memoryview) -> Frame:
    """The frame of this kind that ``body`` (of a Data frame only its head) holds. Raises WireError."""
    try:
        return _decoders[kind].decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError("body", f"{kind.name} does not decode: {error}") from error
