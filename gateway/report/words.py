"""Figures as a planner reads them: few digits, always a unit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import isfinite

UNKNOWN = "not known"


def tokens(value: float | None) -> str:
    """19.4K, 512, 131K."""
    if value is None:
        return UNKNOWN
    if not isfinite(value):
        return "none"
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.3g}K" if value < 999_500 else f"{value / 1e6:.3g}M"


def number(value: float | None, unit: str = "") -> str:
    """Three digits and the unit."""
    if value is None:
        return UNKNOWN
    if not isfinite(value):
        return "no limit"
    plain = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{plain} {unit}" if unit else plain


def seconds(value: float | None) -> str:
    """2.22 s, 340 ms; never for an answer that did not come."""
    if value is None:
        return UNKNOWN
    if not isfinite(value):
        return "never"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def share(value: float | None) -> str:
    """49 %."""
    if value is None:
        return UNKNOWN
    if not isfinite(value):
        return "no limit"
    percent = value * 100
    return f"{percent:.1f} %" if 99 < percent < 100 or 0 < percent < 1 else f"{percent:.0f} %"


def times(value: float | None) -> str:
    """1.33 x."""
    return UNKNOWN if value is None else f"{value:.2f} ×" if isfinite(value) else "without bound"


def split(prefill: Sequence[int], decode: Sequence[int]) -> str:
    """3 prefill : 5 decode, all kinds together."""
    return f"{sum(prefill)} prefill : {sum(decode)} decode"


def moment(at: float) -> str:
    """2026-11-29 20:16 UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def clock(at: float, seconds_too: bool = False) -> str:
    """20:16."""
    return time.strftime("%H:%M:%S" if seconds_too else "%H:%M", time.gmtime(at))


def duration(value: float) -> str:
    """2 h 5 min."""
    if value < 90:
        return f"{value:.0f} s"
    minutes = round(value / 60)
    hours, rest = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    parts = [f"{days} d"] if days else []
    parts += [f"{hours_left} h"] if hours_left else []
    parts += [f"{rest} min"] if rest and not days else []
    return " ".join(parts)
