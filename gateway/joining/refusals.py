"""Nodes that were turned away: counted, logged, and told to whoever keeps the audit log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import Counter

log = logging.getLogger(__name__)


class Cause(StrEnum):
    """Why. ``refused`` is anything that the text alone explains, such as another model."""

    NO_CREDENTIAL = "no_credential"
    WRONG_TOKEN = "wrong_token"  # noqa: S105
    EXPIRED_TOKEN = "expired_token"  # noqa: S105
    CERTIFICATE_NEEDED = "certificate_needed"
    CERTIFICATE_REFUSED = "certificate_refused"
    CERTIFICATE_REVOKED = "certificate_revoked"
    OTHER_CLUSTER = "other_cluster"
    OTHER_NODE = "other_node"
    NOT_JOINED = "not_joined"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A node that may not come in."""

    cause: Cause
    reason: str


class Refusals:
    """Counts by cause; each is logged, and told on as ``tell(who, cluster, cause, reason)``."""

    def __init__(self, tell: Callable[[str, str, str, str], None]) -> None:
        self._tell = tell
        self.counter = Counter(
            "prfaas_nodes_refused", "Nodes that were turned away, by cause.", ["cause"], registry=None
        )
        for cause in Cause:
            self.counter.labels(cause.value)

    def add(self, who: str, cluster: str, away: TurnedAway) -> None:
        """One more. ``who`` and ``cluster`` are what it said it is, "" where it has not said."""
        self.counter.labels(away.cause.value).inc()
        log.warning("node refused who=%r cause=%s reason=%r", who[:63], away.cause.value, away.reason)
        self._tell(_plain(who)[:63], _plain(cluster)[:63], away.cause.value, _plain(away.reason))


def _plain(text: str) -> str:
    """What a stranger said, as it can be shown on a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)
