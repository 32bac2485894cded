"""How any job ends before its time: cancelled by its gateway, or failed."""

from __future__ import annotations

import msgspec


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop a job (a transfer id in hex, or a generation id) within one chunk and free all it holds."""

    job: str


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """The cancelled job holds nothing any more. Sent for every Cancel, unknown jobs included."""

    job: str
    prefilled_tokens: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A job ended badly and holds nothing any more. ``stage``: queue, prefill, transfer, load or decode."""

    job: str
    stage: str
    cause: str
    detail: str
