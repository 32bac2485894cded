"""What gateways over one Redis must have in common, and what is said where they do not.

Nodes hold a stream to each of them: a node of one model, whose certificate one authority signed, and whose jobs bear
deadlines by the clock of whoever gave them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

CLOCK_S = 2.0
"""By how much clocks may differ: nodes allow as much where they check a ticket."""


class Common(msgspec.Struct, frozen=True):
    """Of one gateway. ``model`` is the digest of its fingerprint, "" where it serves none of its own.

    ``roots`` are digests of the certificates that it believes; none where its nodes need no certificate.
    """

    model: str = ""
    roots: tuple[str, ...] = ()


def differences(mine: Common, others: Iterable[tuple[str, Common | None]], clock_s: float) -> list[str]:
    """What is wrong, a sentence each. ``others`` come with their URLs, and None for one that does not say.

    ``clock_s`` is how far the clock here is ahead of Redis's.
    """
    found = []
    if abs(clock_s) > CLOCK_S:
        way = "ahead of" if clock_s > 0 else "behind"
        found.append(
            f"the clock here is {abs(clock_s):.0f} s {way} Redis's: nodes refuse tickets and deadlines by another "
            "clock than theirs; have all machines set their clocks by NTP"
        )
    for url, other in others:
        if other is None:
            continue
        if mine.model and other.model and mine.model != other.model:
            found.append(
                f"the gateway at {url} serves another model over the same Redis: no node joins both; give one of them "
                "another --redis-prefix"
            )
        if mine.roots and other.roots and not set(mine.roots) & set(other.roots):
            found.append(
                f"the gateway at {url} believes in other certificate authorities: nodes that joined it are refused "
                "here; have all gateways use the same --ca"
            )
    return found
