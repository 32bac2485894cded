"""``x-ratelimit-*``: what a key may still use, in the words of OpenAI's answers."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.admission.limits import Limit, Usage

_NAMES = {Limit.REQUESTS: "requests", Limit.TOKENS: "tokens"}


def rate_headers(usages: Sequence[Usage], now: float) -> list[tuple[bytes, bytes]]:
    """Of each rate that anybody limits: the limit a minute, what is left at once, when that is whole again.

    Where several limit it, the one that leaves least.
    """
    if not usages:
        return []
    found = [usage.left(now) for usage in usages]
    headers: list[tuple[bytes, bytes]] = []
    for limit, name in _NAMES.items():
        left = min((one[limit] for one in found if limit in one), key=lambda one: one.remaining, default=None)
        if left is not None:
            told = (("limit", left.value), ("remaining", left.remaining), ("reset", duration(left.reset_s)))
            headers += [(f"x-ratelimit-{what}-{name}".encode(), str(value).encode()) for what, value in told]
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.0f}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.0f}s" if minutes else f"{rest:.3g}s"
