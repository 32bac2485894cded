"""How inexact a request lets its KV become: the levels of ``x-prfaas-kv-quality``, and what each allows."""

from __future__ import annotations

from collections.abc import Collection
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

    def allows(self, needed: Quality) -> bool:
        """Whether what needs that level may be used at this one."""
        levels = list(Quality)
        return levels.index(needed) <= levels.index(self)

    @classmethod
    def needed_for(cls, members: Collection[str]) -> Quality | None:
        """The strictest level that allows all codecs of these names; None where no level does."""
        plain = [name for name in members if not name.startswith(TRANSFORM_PREFIX)]
        transformed = len(plain) < len(members)
        levels = (level for level in cls if level is Quality.COMPACT or not transformed)
        return next((level for level in levels if set(plain).issubset(level.codecs)), None)


TRANSFORM_PREFIX = "transform:"
"""How the names of calibrations begin."""

_ALLOWED = {
    Quality.EXACT: ("raw", "lossless"),
    Quality.NEAR: ("raw", "lossless", "fp16", "fp8", "int8"),
    Quality.COMPACT: ("raw", "lossless", "fp16", "fp8", "int8", "int4"),
}
