"""Work of which KV travels: prompts that are prefilled for another node, and prefixes that move to one."""

from __future__ import annotations

import msgspec

from kvcache.control.peers import KvPeer, KvSource


class PrefillJob(msgspec.Struct, frozen=True, tag=True):
    """Compute tokens [start, stop) and send them to whoever holds the ticket; job id = transfer id in hex.

    ``dial`` is set where the decode node accepts and this one must dial. ``priority`` 0 runs first. ``salt`` and
    ``lora`` go into the names of the prompt's blocks. ``traceparent`` is the W3C trace context of the work, "" where it
    is not traced. ``transports`` are to be tried in this order; () is TCP.
    """

    ticket: bytes
    token_ids: tuple[int, ...]
    codec: str
    priority: int = 0
    dial: KvPeer | None = None
    salt: str = ""
    lora: str = ""
    traceparent: str = ""
    transports: tuple[str, ...] = ()


class PrefillStarted(msgspec.Struct, frozen=True, tag=True):
    """The engine has begun to compute this job, behind the first ``cached_tokens``."""

    transfer: bytes
    cached_tokens: int = 0


class PrefillDone(msgspec.Struct, frozen=True, tag=True):
    """Every token of the job is computed; the transfer may still be under way.

    ``tokens`` were computed in ``compute_s``, behind ``cached_tokens`` that needed no computing.
    """

    transfer: bytes
    compute_s: float
    tokens: int
    cached_tokens: int = 0


class SharePrefix(msgspec.Struct, frozen=True, tag=True):
    """Send the ticket's tokens [start, stop) from the prefix cache alone; job id = transfer id in hex.

    ``stop`` is a block boundary, and windows and states are those of the snapshot there. A node that does not keep all
    of it computes nothing: it answers Failed with the cause ``prefix_gone``. It says nothing where all went well.
    ``dial`` is set where this node must dial. ``transports`` are to be tried in this order; () is TCP. Only for nodes
    whose Join says that they know it.
    """

    ticket: bytes
    token_ids: tuple[int, ...]
    codec: str
    dial: KvPeer | None = None
    salt: str = ""
    lora: str = ""
    transports: tuple[str, ...] = ()


class TakePrefix(msgspec.Struct, frozen=True, tag=True):
    """Fetch what another node was told to share, and keep it in the prefix cache; job id = transfer id in hex.

    ``token_ids`` end where the ticket does; the blocks before its start must be here. TransferDone says that it is
    kept. It waits for no room: where there is none to spare it fails. Only for nodes whose Join says that they know it.
    """

    source: KvSource
    token_ids: tuple[int, ...]
    salt: str = ""
    lora: str = ""


class TransferDone(msgspec.Struct, frozen=True, tag=True):
    """Asking side: verified and committed, or kept where a TakePrefix asked for it.

    ``exposed_s`` runs from the last chunk's end to the commit.
    ``transfer_s`` runs from the grant of room; for pieces that did not wait for it, as if granted a round trip before.
    ``kv_digest`` is xxh3-128 over the piece digests in plan order: of the committed bytes, or, where a codec is
    inexact, of what arrived.
    ``transport`` carried it at last, ``failed_transports`` had been tried before. ``backlog_bytes`` (raw) were still to
    come, or to be acknowledged, when the last chunk was computed: they are what ``exposed_s`` was taken by.
    """

    transfer: bytes
    raw_bytes: int
    wire_bytes: int
    codec: str
    transfer_s: float
    exposed_s: float
    kv_digest: bytes
    transport: str = "tcp"
    backlog_bytes: int = 0
    failed_transports: tuple[str, ...] = ()
