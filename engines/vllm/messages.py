"""What a node and the connectors inside its vLLM server say to each other, over one unix socket for each worker.

The node passes its pool's descriptor with the first byte, then a PoolInfo. A worker answers Attached or Refusal. A
job is made known to every worker before vLLM hears of it, so that a request names nothing but its job: pages come from
the node alone, and a worker that does not know a job touches no memory for it.
"""

from __future__ import annotations

import msgspec

from engines.protocol import Checkpoint, Exported, Loaded, Offered, Pulse, StoreCommand, Stored
from kvcache.layout import KVLayout

GREETING = b"P"
"""The byte that carries the pool's descriptor."""


class PoolInfo(msgspec.Struct, frozen=True, tag=True):
    """The node's pool, and how the model's KV lies in it. ``chunk_tokens`` is the grid of every transfer's plan."""

    page_bytes: int
    pages: int
    block_tokens: int
    chunk_tokens: int
    layout: KVLayout


class Enlist(msgspec.Struct, frozen=True, tag=True):
    """A job that is about to be sent to vLLM.

    Export tokens [start, stop) into ``pages``, of which nothing below ``held`` is to be written; ``stop`` 0 exports
    nothing. Load the first ``load`` tokens from ``load_pages``, 0 for none. ``checkpoints`` are offered as they are
    computed, and at the end the full blocks from ``keep_from`` on (None: none of them).
    """

    job: str
    start: int = 0
    stop: int = 0
    pages: tuple[int, ...] = ()
    held: int = 0
    load: int = 0
    load_pages: tuple[int, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    keep_from: int | None = None


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    """Forget a job. Nothing of it is touched once Dismissed has answered this, whatever vLLM still does with it."""

    job: str


class Attached(msgspec.Struct, frozen=True, tag=True):
    """A worker has mapped the pool and knows every layer. ``packing`` is how its kernels lay K and V out."""

    rank: int
    ranks: int
    packing: str
    block_tokens: tuple[int, ...]


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot exchange this server's KV, and ends."""

    reason: str


class Enlisted(msgspec.Struct, frozen=True, tag=True):
    """The answer to Enlist; ``refusal`` says why not, "" where the job is known now."""

    job: str
    refusal: str = ""


class Computed(msgspec.Struct, frozen=True, tag=True):
    """A job's export lies in the pool, ``compute_s`` after its first step began, and all it has is offered."""

    job: str
    compute_s: float


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Something of a job could not be exported, loaded or offered; nothing more of it will be."""

    job: str
    detail: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """vLLM is done with a job that was watched: nothing more will be offered."""

    job: str


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The answer to Dismiss. ``tokens`` of an export were computed or held."""

    job: str
    tokens: int = 0


ToWorker = PoolInfo | Enlist | StoreCommand | Dismiss
FromWorker = (
    Attached | Refusal | Enlisted | Exported | Computed | Loaded | Broken | Offered | Stored | Ended | Dismissed | Pulse
)

to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
