"""Which transfers of a remote cluster are checked, and when a cluster is taken for one that lies.

Honest nodes on other hardware differ by rounding; KV of another model, of other tokens, or made up is off by about its
own size. One audit that fails may be a fault of memory or of this side, so it takes several in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, slots=True)
class AuditValues:
    """``share`` of the prompts that a remote cluster prefilled are checked, of those of at most ``most_tokens``.

    An error beyond ``tolerance`` fails; ``strikes`` failures in a row, and the cluster is flagged.
    """

    share: float = 0.01
    most_tokens: int = 8192
    tolerance: float = 0.05
    strikes: int = 3


class ClusterAudits:
    """What audits of one cluster came to."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0
        self.worst = 0.0
        self._strikes = 0

    def add(self, error: float, values: AuditValues) -> bool:
        """One more; whether this one makes enough in a row to flag the cluster. The count begins anew then."""
        if isfinite(error) and error <= values.tolerance:
            self.passed += 1
            self._strikes = 0
            self.worst = max(self.worst, error)
            return False
        self.failed += 1
        self._strikes += 1
        if self._strikes < values.strikes:
            return False
        self._strikes = 0
        return True


def chosen(values: AuditValues, tokens: int, exact: bool, drawn: float) -> bool:
    """Whether to check a prompt of so many tokens; ``drawn`` is uniform in [0, 1). Inexact KV is off by design."""
    return exact and tokens <= values.most_tokens and drawn < values.share
