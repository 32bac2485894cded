"""What plots are drawn with: scales, ticks, and SVG text. Whatever came from outside is escaped here, and only here.

Colours and fonts are classes that the page's style sheet knows, so that a plot is legible on light and on dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

FONT_PX = 13.0
CHAR_PX = 0.62 * FONT_PX
"""What a character takes at most on average, in the widest of the common fonts."""
LINE_PX = 18.0


@dataclass(frozen=True, slots=True)
class Frame:
    """A plot's size in px, and the margins around the area that data lie in."""

    name: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    @property
    def x0(self) -> float:
        """Left edge of the data."""
        return self.left

    @property
    def x1(self) -> float:
        """Right edge."""
        return self.width - self.right

    @property
    def y0(self) -> float:
        """Bottom edge."""
        return self.height - self.bottom

    @property
    def y1(self) -> float:
        """Top edge."""
        return self.top

    @property
    def wide(self) -> bool:
        """Whether there is room for long labels."""
        return self.width >= 600


@dataclass(frozen=True, slots=True)
class Linear:
    """``low`` lies at ``start`` and ``high`` at ``end``; what is beyond lies on the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where it lies."""
        part = (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1.0)
        return self.start + part * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Log:
    """The same in equal ratios; both bounds are positive."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where it lies."""
        bounded = min(max(value, self.low), self.high)
        part = log10(bounded / self.low) / (log10(self.high / self.low) or 1.0)
        return self.start + part * (self.end - self.start)


def ticks(high: float, most: int) -> list[float]:
    """Round values from 0 to ``high``, at most so many."""
    if high <= 0:
        return [0.0]
    step = nice(high / most)
    return [i * step for i in range(floor(high / step + 1e-9) + 1)]


def nice(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * (1 - 1e-9))


def decades(low: float, high: float, most: int) -> list[float]:
    """Round values for a logarithmic axis, within the bounds: 1, 2 and 5 times powers of ten, or fewer of them."""
    found: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [
            factor * 10.0**n
            for n in range(floor(log10(low)), ceil(log10(high)) + 1)
            for factor in factors
            if low <= factor * 10.0**n <= high
        ]
        if len(found) <= most:
            break
    return found


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """One line of text; ``kind`` are classes."""
    classes = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, opacity: float | None = None) -> str:
    """A rectangle."""
    faint = "" if opacity is None else f' fill-opacity="{opacity:.3f}"'
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}" '
        f'class="{kind}"{faint}/>'
    )


def path(points: Sequence[tuple[float, float]], kind: str, close_at: float | None = None) -> str:
    """A line through points; with ``close_at`` an area down to that y."""
    if not points:
        return ""
    moves = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    if close_at is not None:
        moves = f"{points[0][0]:.1f},{close_at:.1f}L{moves}L{points[-1][0]:.1f},{close_at:.1f}Z"
    return f'<path d="M{moves}" class="{kind}"/>'


def cross(x: float, y: float, kind: str) -> str:
    """A cross, for what lies beyond the plot."""
    return f'<path d="M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8" class="{kind}"/>'


def figure(name: str, frame: Frame, title: str, description: str, parts: Sequence[str]) -> str:
    """A whole plot. ``name`` is unique on the page; title and description are what a screen reader says."""
    ref = f"{name}-{frame.name}"
    return (
        f'<svg class="plot {frame.name}" viewBox="0 0 {frame.width:g} {frame.height:g}" width="{frame.width:g}" '
        f'height="{frame.height:g}" role="img" aria-labelledby="{ref}-t {ref}-d">'
        f'<title id="{ref}-t">{escape(title)}</title><desc id="{ref}-d">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def room(words: str) -> float:
    """About how many px a line of text takes."""
    return len(words) * CHAR_PX


def apart(places: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """The places moved so that each is ``least`` from the next, in the same order, within the bounds if they fit."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    at = low
    for i in order:
        moved[i] = at = max(moved[i], at)
        at += least
    at = high
    for i in reversed(order):
        moved[i] = at = min(moved[i], at)
        at -= least
    return moved
