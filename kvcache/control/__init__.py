"""Messages of the control stream between a node and its gateway.

A node dials the gateway and keeps one stream open; jobs and cancels come down, heartbeats, progress and tokens go up.
Unknown fields are ignored, and new ones have defaults, so that gateways and nodes of neighbouring versions talk. A
message is the same wherever its class stands: its tag is the class's name.
"""

from __future__ import annotations

from kvcache.control.audits import AuditKv, KvAudited
from kvcache.control.coding import (
    MAX_MESSAGE_BYTES,
    ControlError,
    FromNode,
    Order,
    ToNode,
    decode_from_node,
    decode_to_node,
    encode,
)
from kvcache.control.endings import Cancel, Cancelled, Failed
from kvcache.control.generation import AnswerEnded, AnswerPart, Delta, Finished, GenerateJob, Sampling, TokenLogprob
from kvcache.control.heartbeat import Beat, CodecWork, Heartbeat, LinkReport
from kvcache.control.joining import Join, ModelInfo, Refused, Welcome
from kvcache.control.peers import KvAddress, KvPeer, KvSource
from kvcache.control.renewal import CertificateIssued, RenewCertificate
from kvcache.control.replicas import MAX_GATEWAYS, Already, Leaving, Siblings
from kvcache.control.steering import ChangeRole, Drain, KvEvents, ProbeLink, RateLease, ReplayKvEvents, RoleChanged
from kvcache.control.transfers import PrefillDone, PrefillJob, PrefillStarted, SharePrefix, TakePrefix, TransferDone

__all__ = [
    "MAX_GATEWAYS",
    "MAX_MESSAGE_BYTES",
    "Already",
    "AnswerEnded",
    "AnswerPart",
    "AuditKv",
    "Beat",
    "Cancel",
    "Cancelled",
    "CertificateIssued",
    "ChangeRole",
    "CodecWork",
    "ControlError",
    "Delta",
    "Drain",
    "Failed",
    "Finished",
    "FromNode",
    "GenerateJob",
    "Heartbeat",
    "Join",
    "KvAddress",
    "KvAudited",
    "KvEvents",
    "KvPeer",
    "KvSource",
    "Leaving",
    "LinkReport",
    "ModelInfo",
    "Order",
    "PrefillDone",
    "PrefillJob",
    "PrefillStarted",
    "ProbeLink",
    "RateLease",
    "Refused",
    "RenewCertificate",
    "ReplayKvEvents",
    "RoleChanged",
    "Sampling",
    "SharePrefix",
    "Siblings",
    "TakePrefix",
    "ToNode",
    "TokenLogprob",
    "TransferDone",
    "Welcome",
    "decode_from_node",
    "decode_to_node",
    "encode",
]
