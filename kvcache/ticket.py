"""Tickets: the gateway's signed permission for one transfer of KV between two named nodes."""

from __future__ import annotations

import msgspec


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
