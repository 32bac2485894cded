"""All messages of the control stream, by direction, and their bytes: msgpack maps with a type tag, bounded in size."""

from __future__ import annotations

import msgspec

from kvcache.control.audits import AuditKv, KvAudited
from kvcache.control.endings import Cancel, Cancelled, Failed
from kvcache.control.generation import AnswerEnded, Delta, Finished, GenerateJob
from kvcache.control.heartbeat import Beat, Heartbeat
from kvcache.control.joining import Join, Refused, Welcome
from kvcache.control.renewal import CertificateIssued, RenewCertificate
from kvcache.control.replicas import Already, Leaving, Siblings
from kvcache.control.steering import (
    ChangeRole,
    Drain,
    KvEvents,
    ProbeLink,
    RateLease,
    ReplayKvEvents,
    RoleChanged,
)
from kvcache.control.transfers import PrefillDone, PrefillJob, PrefillStarted, SharePrefix, TakePrefix, TransferDone

MAX_MESSAGE_BYTES = 16 << 20

FromNode = (
    Join
    | Heartbeat
    | PrefillStarted
    | PrefillDone
    | TransferDone
    | Delta
    | AnswerEnded
    | Finished
    | Failed
    | Cancelled
    | KvEvents
    | RoleChanged
    | RenewCertificate
    | KvAudited
)
Order = (
    PrefillJob
    | GenerateJob
    | SharePrefix
    | TakePrefix
    | Cancel
    | Drain
    | RateLease
    | ProbeLink
    | ReplayKvEvents
    | ChangeRole
    | CertificateIssued
    | AuditKv
)
"""What a gateway may tell a node that has joined to do, or to have."""
ToNode = Welcome | Refused | Already | Beat | Siblings | Leaving | Order

_encoder = msgspec.msgpack.Encoder()
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)


class ControlError(ValueError):
    """A control message that does not decode: the stream that carried it is closed."""


def encode(message: FromNode | ToNode) -> bytes:
    """One message as the payload of one binary WebSocket frame."""
    return _encoder.encode(message)


def decode_from_node(data: bytes) -> FromNode:
    """Parse what a node sent. Raises ControlError."""
    try:
        return _from_node.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControlError(str(error)) from error


def decode_to_node(data: bytes) -> ToNode:
    """Parse what a gateway sent. Raises ControlError."""
    try:
        return _to_node.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControlError(str(error)) from error
