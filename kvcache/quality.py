"""How inexact a request lets its KV become: the levels of ``x-prfaas-kv-quality``, and what each allows."""

from __future__ import annotations

from enum import StrEnum


class Quality(StrEnum):
    """From the strictest; each level allows what the one before it does.

    EXACT: not a bit changes. NEAR: no more than eight bits a value would change anyway. COMPACT: the fewest bytes.
    """

    EXACT = "exact"
    NEAR = "near"
    COMPACT = "compact"

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs that this level allows; a set of codecs is allowed where all its members are.

        COMPACT allows the transform codec too, in whichever calibrations the receiver has.
        """
        return _ALLOWED[self]


_ALLOWED = {
    Quality.EXACT: ("raw", "lossless"),
    Quality.NEAR: ("raw", "lossless", "fp16", "fp8", "int8"),
    Quality.COMPACT: ("raw", "lossless", "fp16", "fp8", "int8", "int4"),
}
