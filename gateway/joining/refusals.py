"""Nodes that were turned away: counted, logged, and told to whoever keeps the audit log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import StrEnum

import prometheus_client

log = logging.getLogger(__name__)

LATELY_S = 600.0
MOST_KEPT = 256


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
    """A node that may not come in. ``field`` of its Join must change, "" where that is not what keeps it out."""

    cause: Cause
    reason: str
    field: str = ""


class Refusals:
    """Counts by cause; each is logged, and told on as ``tell(who, cluster, cause, reason)``."""

    def __init__(self, tell: Callable[[str, str, str, str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._now = now
        self._newest: dict[str, tuple[float, str]] = {}
        """Of the newest strangers: when each was turned away last, and why."""
        self.counter = prometheus_client.Counter(
            "prfaas_nodes_refused", "Nodes that were turned away, by cause.", ["cause"], registry=None
        )
        for cause in Cause:
            self.counter.labels(cause.value)

    def add(self, who: str, cluster: str, away: TurnedAway) -> None:
        """One more. ``who`` and ``cluster`` are what it said it is, "" where it has not said."""
        self.counter.labels(away.cause.value).inc()
        who = who[:63]
        self._newest.pop(who, None)
        self._newest[who] = self._now(), away.field or away.cause.value
        if len(self._newest) > MOST_KEPT:
            del self._newest[next(iter(self._newest))]
        log.warning("node refused who=%r cause=%s reason=%r", who, away.cause.value, away.reason)
        self._tell(_plain(who), _plain(cluster)[:63], away.cause.value, _plain(away.reason))

    def lately(self, here: Container[str] = ()) -> Counter[str]:
        """How many nodes were turned away in the last LATELY_S, by cause or field, but for those that are here by now.

        At most MOST_KEPT are remembered.
        """
        since = self._now() - LATELY_S
        return Counter(why for who, (at, why) in self._newest.items() if at > since and who not in here)


def _plain(text: str) -> str:
    """What a stranger said, as it can be shown on a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)
