"""Tickets: the gateway's signed permission for one transfer of KV between two named nodes.

Signed form: one version byte, 64 bytes of Ed25519 signature, then the msgpack body. The signature covers a label and
the body, so that a ticket's key can sign nothing else that reads as a ticket. Whether a ticket was used before is the
prefill node's to remember; everything that follows from the ticket alone is checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

TICKET_VERSION = 1
MAX_TICKET_BYTES = 4096
MAX_LIFETIME_S = 86400.0
MAX_TOKENS = 1 << 31
MAX_BYTE_CAP = 1 << 50
MAX_NAME_CHARS = 256

_LABEL = b"prfaas ticket 1\0"
_SIGNATURE_BYTES = 64


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What one transfer may be. Times are Unix seconds.

    ``transfer`` is 16 random bytes, one per attempt. ``decode_key`` is the raw Ed25519 public key that the asking node
    must prove in its handshake. ``byte_cap`` bounds raw bytes.
    """

    transfer: bytes
    request_id: str
    attempt: int
    prefill_node: str
    prefill_incarnation: str
    decode_key: bytes
    fingerprint: str
    start: int
    stop: int
    chunk_tokens: int
    byte_cap: int
    issued: float
    deadline: float


class TicketError(ValueError):
    """This ticket permits nothing. ``field`` names what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"ticket {field}: {reason}")
        self.field = field
        self.reason = reason


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


def sign_ticket(ticket: Ticket, key: Ed25519PrivateKey) -> bytes:
    """The signed form of ``ticket``. Raises TicketError for one that no node would accept."""
    _check_bounds(ticket)
    body = _encoder.encode(ticket)
    return bytes([TICKET_VERSION]) + key.sign(_LABEL + body) + body


def verify_ticket(data: bytes, public_key: bytes, now: float, skew_s: float = 2.0) -> Ticket:
    """The ticket in ``data``, if the holder of ``public_key`` (32 raw bytes) signed it and it is in force at ``now``.

    The gateway's clock may differ from this one by ``skew_s`` either way. Raises TicketError.
    """
    if len(data) > MAX_TICKET_BYTES:
        raise TicketError("size", f"{len(data)} bytes, at most {MAX_TICKET_BYTES} are read")
    if len(data) <= 1 + _SIGNATURE_BYTES:
        raise TicketError("size", f"{len(data)} bytes are too few for a ticket")
    if data[0] != TICKET_VERSION:
        raise TicketError("version", f"{data[0]} is not spoken here, expected {TICKET_VERSION}")
    signature, body = data[1 : 1 + _SIGNATURE_BYTES], data[1 + _SIGNATURE_BYTES :]
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _LABEL + body)
    except InvalidSignature:
        raise TicketError("signature", "not signed with the gateway's ticket key") from None
    ticket = _decode(body)
    _check_bounds(ticket)
    if ticket.issued > now + skew_s:
        raise TicketError("issued", f"{ticket.issued - now:.1f} s in the future, {skew_s} s of clock skew are allowed")
    if ticket.deadline <= now - skew_s:
        raise TicketError("deadline", f"passed {now - ticket.deadline:.1f} s ago")
    return ticket


def verify_any(data: bytes, public_keys: Sequence[bytes], now: float, skew_s: float = 2.0) -> Ticket:
    """As ``verify_ticket``, for whichever of these keys signed it: a node may trust several gateways.

    Raises TicketError, also where there is no key.
    """
    if not public_keys:
        raise TicketError("signature", "this node has not joined the gateway that it would be of")
    for key in public_keys[:-1]:
        try:
            return verify_ticket(data, key, now, skew_s)
        except TicketError as error:
            if error.field != "signature":
                raise
    return verify_ticket(data, public_keys[-1], now, skew_s)


def claimed_transfer(data: bytes) -> bytes | None:
    """The transfer id that an unverified ticket names, None where it names none.

    Enough to tell its sender what was refused; nothing else may follow from it.
    """
    if len(data) > MAX_TICKET_BYTES:
        return None
    try:
        transfer = _decode(data[1 + _SIGNATURE_BYTES :]).transfer
    except TicketError:
        return None
    return transfer if len(transfer) == 16 else None


def _decode(body: bytes) -> Ticket:
    """Parse a body. Raises TicketError; fields of later versions are skipped, and may nest too deeply for that."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TicketError("body", str(error)) from error


def _check_bounds(ticket: Ticket) -> None:
    """Raise TicketError unless every field lies in its range."""
    for field, length in (("transfer", 16), ("decode_key", 32)):
        size = len(getattr(ticket, field))
        if size != length:
            raise TicketError(field, f"{size} bytes, expected {length}")
    for field in ("request_id", "prefill_node", "prefill_incarnation", "fingerprint"):
        size = len(getattr(ticket, field))
        if not 1 <= size <= MAX_NAME_CHARS:
            raise TicketError(field, f"{size} characters, expected 1 to {MAX_NAME_CHARS}")
    for field, low, high in (
        ("attempt", 0, 1 << 16),
        ("start", 0, MAX_TOKENS),
        ("stop", ticket.start + 1, MAX_TOKENS),
        ("chunk_tokens", 1, MAX_TOKENS),
        ("byte_cap", 1, MAX_BYTE_CAP),
    ):
        value = getattr(ticket, field)
        if not low <= value <= high:
            raise TicketError(field, f"{value} lies outside [{low}, {high}]")
    for field in ("issued", "deadline"):
        if not isfinite(getattr(ticket, field)):
            raise TicketError(field, "not a finite time")
    if not 0 < ticket.deadline - ticket.issued <= MAX_LIFETIME_S:
        raise TicketError("deadline", f"must follow issued within {MAX_LIFETIME_S:.0f} s")
