"""Role conversions, and what each brought: the same figures before it began and after it ended.

The traffic of the two stretches differs too, so the offered rate stands beside them; nothing is called an effect.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from scheduler.lengths import FloatArray
from scheduler.report.requests import Served, arrivals, first_tokens, quantile

STRETCH_S = 600.0
LEAST_REQUESTS = 20


class Converted(msgspec.Struct, frozen=True):
    """One role change: Unix times, its end and outcome (None and the phase it is in while it goes on)."""

    number: int
    node: str
    role_from: str
    role_to: str
    began: float
    ended: float | None
    outcome: str
    by: str
    reason: str
    promised_gain: float | None = None


class Stretch(msgspec.Struct, frozen=True):
    """Requests that arrived within ``seconds``: rates per second, TTFT in seconds (infinite: never)."""

    seconds: float
    offered_req_s: float
    answered_req_s: float
    ttft_p50_s: float
    ttft_p90_s: float


class ConversionEffect(msgspec.Struct, frozen=True):
    """``before`` and ``after`` are None where too few requests came, or another conversion lies between."""

    conversion: Converted
    before: Stretch | None
    after: Stretch | None


def effects(
    conversions: Sequence[Converted], requests: Sequence[Served], since: float, until: float
) -> tuple[ConversionEffect, ...]:
    """Each conversion, in the order given. Requests are known of [``since``, ``until``) only."""
    when, ttft = arrivals(requests), first_tokens(requests)
    found = []
    for one in conversions:
        others = [other for other in conversions if other is not one]
        ends = [other.ended for other in others if other.ended is not None and other.ended <= one.began]
        begins = [other.began for other in others if one.ended is not None and other.began >= one.ended]
        before = _stretch(when, ttft, max([since, one.began - STRETCH_S, *ends]), min(one.began, until))
        after = None
        if one.ended is not None:
            after = _stretch(when, ttft, max(one.ended, since), min([until, one.ended + STRETCH_S, *begins]))
        found.append(ConversionEffect(one, before, after))
    return tuple(found)


def _stretch(
    when: FloatArray,
    ttft: FloatArray,
    begin: float,
    end: float,
) -> Stretch | None:
    inside = ttft[(when >= begin) & (when < end)]
    if len(inside) < LEAST_REQUESTS:
        return None
    seconds = end - begin
    return Stretch(
        seconds,
        len(inside) / seconds,
        float(np.isfinite(inside).sum()) / seconds,
        quantile(inside, 0.5),
        quantile(inside, 0.9),
    )
