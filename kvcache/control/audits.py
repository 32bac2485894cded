"""Checking KV that came from elsewhere: the node that got it computes it again, and says how far the two are apart."""

from __future__ import annotations

import msgspec


class AuditKv(msgspec.Struct, frozen=True, tag=True):
    """Compute the first tokens of a prompt again and compare them with what is kept of them from node ``origin``.

    Only for nodes whose Join says that they know it. It is done when the node has nothing else to do, or not at all.
    """

    audit: str
    token_ids: tuple[int, ...]
    origin: str
    salt: str = ""
    lora: str = ""


class KvAudited(msgspec.Struct, frozen=True, tag=True):
    """What came of an AuditKv. ``tokens`` were compared, 0 where ``cause`` says why none could be.

    ``error`` is, of the tensor in which it is greatest, the root mean square of the differences over that of the values
    computed here; infinite where something is not a number.
    """

    audit: str
    tokens: int = 0
    error: float = 0.0
    cause: str = ""
