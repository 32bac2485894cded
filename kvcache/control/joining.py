"""How a node joins a gateway: who it is, what it serves and understands, and whether it is let in."""

from __future__ import annotations

import msgspec

from kvcache.control.heartbeat import CodecWork
from kvcache.control.peers import KvAddress
from kvcache.wire import Role


class ModelInfo(msgspec.Struct, frozen=True):
    """What a node serves. ``fingerprint`` holds the named parts, so that a mismatch can name the field."""

    name: str
    fingerprint: dict[str, str]
    context_tokens: int
    chunk_tokens: int
    vocab_size: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """First message of a node. ``kv_address`` None says that this node only dials.

    ``codecs`` are the sets of codecs that it has for this model, as it measured them when it started, and
    ``encoders`` is how many processors encode one transfer at once. A node that ``probes`` understands ProbeLink,
    one with ``kv_events`` ReplayKvEvents, one that ``converts`` ChangeRole, one that ``moves`` SharePrefix and
    TakePrefix; ``role_epoch`` is that of the last ChangeRole that it obeyed. ``max_running`` is how many answers it
    speaks at once, 0 for one that does not say.
    ``max_answers`` is how many answers to one prompt it gives at most, 0 for a node that knows no penalties either.
    ``transports`` are what it can send and receive KV by; a node that names none has TCP.
    One that ``audits`` understands AuditKv.
    ``topology`` is its machine as ``kvcache.topology`` writes it, b"" where it says nothing; one that cannot be read
    keeps nobody out.
    One with ``siblings`` understands Siblings, Leaving and Already; ``gateways`` are those that it holds a stream to
    already, by the names in their Welcomes.
    """

    node_id: str
    incarnation: str
    cluster: str
    role: Role
    public_key: bytes
    kv_address: KvAddress | None
    model: ModelInfo
    version: str
    max_queue: int
    codecs: tuple[CodecWork, ...] = ()
    encoders: int = 1
    probes: bool = False
    kv_events: bool = False
    converts: bool = False
    role_epoch: int = 0
    max_running: int = 0
    topology: bytes = b""
    moves: bool = False
    siblings: bool = False
    gateways: tuple[str, ...] = ()
    max_answers: int = 0
    transports: tuple[str, ...] = ()
    audits: bool = False


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Accepted. ``ticket_key`` is the gateway's raw Ed25519 public key; beats are expected every ``beat_s``.

    ``gateway`` names this very process, as long as it lives; "" where it is too old to say.
    """

    ticket_key: bytes
    beat_s: float
    lease_s: float
    gateway: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Not accepted; the node exits with this text. ``field`` names what must change."""

    field: str
    reason: str
