"""The plots of traffic and stages: lengths with the threshold, capacity against load, and Lambda over (t, N_p)."""

from __future__ import annotations

from itertools import pairwise
from math import inf, isfinite

from gateway.report import words
from gateway.report.svg import LINE_PX, Frame, Linear, Log, decades, figure, line, rect, room, text, ticks
from scheduler.report.capacity import Advice, CapacityView, Surface
from scheduler.report.traffic import TrafficProfile

WIDE = Frame("wide", 880, 330, 56, 24, 52, 48)
NARROW = Frame("narrow", 340, 290, 44, 12, 52, 48)
CLIP = 2.5
"""A stage with that much more room than the fullest is cut off, so that the others can be told apart."""


def lengths(frame: Frame, traffic: TrafficProfile, capacity: CapacityView | None) -> str:
    """Histogram of uncached prompt lengths, coloured by where each side of the threshold is prefilled."""
    spread = traffic.uncached
    assert spread is not None
    x = Log(spread.edges[0], spread.edges[-1], frame.x0, frame.x1)
    shares = [count / spread.count for count in spread.counts]
    y = Linear(0, max(shares) * 1.08, frame.y0, frame.y1)
    threshold = inf if capacity is None else capacity.now.threshold
    parts = []
    for tick in ticks(max(shares), 4):
        parts += [line(frame.x0, y(tick), frame.x1, y(tick), "grid")]
        parts += [text(frame.x0 - 8, y(tick) + 4, f"{tick * 100:g} %", "axis", "end")]
    for low, high, part in zip(spread.edges[:-1], spread.edges[1:], shares, strict=True):
        for begin, end, kind in _sides(low, high, threshold):
            gap = 1.0 if end == high else 0.0
            parts.append(rect(x(begin), y(part), x(end) - x(begin) - gap, frame.y0 - y(part), kind))
    parts += [
        text(x(tick), frame.y0 + 20, words.tokens(tick), "axis", "middle")
        for tick in decades(spread.edges[0], spread.edges[-1], 10 if frame.wide else 6)
    ]
    parts.append(line(frame.x0, frame.y0, frame.x1, frame.y0, "base"))
    parts.append(text(frame.x1, frame.y0 + 40, "tokens to prefill (none of them cached at home)", "axis", "end"))
    description = f"{spread.count} requests; median {words.tokens(spread.p50)}, P90 {words.tokens(spread.p90)} tokens."
    if capacity is not None and isfinite(threshold):
        parts += _marks(frame, x, capacity)
        longer = words.share(capacity.now.offloaded)
        description += f" The threshold in force is {words.tokens(threshold)} tokens: {longer} are longer."
    return figure("lengths", frame, "Prompt lengths and the threshold", description, parts)


def _sides(low: float, high: float, threshold: float) -> list[tuple[float, float, str]]:
    """A bar, cut in two where the threshold lies within."""
    if threshold >= high:
        return [(low, high, "home")]
    if threshold <= low:
        return [(low, high, "away")]
    return [(low, threshold, "home"), (threshold, high, "away")]


def _marks(frame: Frame, x: Log, capacity: CapacityView) -> list[str]:
    now, then = capacity.now, capacity.best
    at = x(now.threshold)
    label = f"threshold {words.tokens(now.threshold)}"
    parts = [line(at, frame.y1 - 14, at, frame.y0, "mark")]
    names = [_beside(frame, at, frame.y1 - 4, label, "halo strong")]
    proposed = capacity.advice in (Advice.REBALANCE, Advice.RETUNE) and isfinite(then.threshold)
    if proposed and abs(then.threshold / now.threshold - 1) > 0.03:
        there = x(then.threshold)
        parts += [line(there, frame.y1 - 32, there, frame.y0, "mark dashed")]
        names += [_beside(frame, there, frame.y1 - 22, f"proposed {words.tokens(then.threshold)}", "halo")]
    keep = f"{words.share(1 - now.offloaded)} at home"
    send = f"{words.share(now.offloaded)} to clusters"
    row = frame.y1 - 40
    parts += [text(frame.x0, row, keep, "home-text strong"), text(frame.x1, row, send, "away-text strong", "end")]
    return [*parts, *names]


def _beside(frame: Frame, at: float, y: float, label: str, kind: str) -> str:
    """A label next to a line, on the side that has room."""
    if at + 6 + room(label) <= frame.x1:
        return text(at + 6, y, label, kind)
    return text(at - 6, y, label, kind, "end")


def stages(frame: Frame, capacity: CapacityView) -> str:
    """One bar a stage: the rate of all requests at which it is full, against the rate that is offered."""
    row = 58.0
    frame = Frame(frame.name, frame.width, 44 + row * len(capacity.stages) + 44, 0, 0, 44, 44)
    limits = [stage.full_at for stage in capacity.stages]
    proposed = capacity.advice is not Advice.KEEP
    top = max(
        [capacity.rate, *(min(limit, CLIP * max(min(limits), capacity.rate)) for limit in limits if isfinite(limit))]
    )
    x = Linear(0, top * 1.04, frame.x0, frame.x1)
    parts = []
    for tick in ticks(top, 6 if frame.wide else 4):
        parts += [line(x(tick), frame.y1, x(tick), frame.y0, "grid")]
        # the first and the last label stay within the plot
        anchor = "start" if tick == 0 else "end" if x(tick) > frame.x1 - 12 else "middle"
        parts += [text(x(tick), frame.y0 + 18, f"{tick:g}", "axis", anchor)]
    parts.append(text(frame.x1, frame.y0 + 36, "requests per second, of all", "axis", "end"))
    names = []
    for index, (stage, kind) in enumerate(zip(capacity.stages, ("home", "away", "speak"), strict=True)):
        y = frame.y1 + index * row
        used = isfinite(stage.full_at)
        nodes = f"{stage.name}, {stage.nodes:g} node{'' if stage.nodes == 1 else 's'}"
        right = f"{words.number(stage.full_at)} · {words.share(stage.load)} used" if used else "takes no requests"
        full = " strong" if stage.name == capacity.bottleneck else ""
        names += [text(frame.x0, y + 18, nodes, f"halo{full}"), text(frame.x1, y + 18, right, f"halo{full}", "end")]
        if used:
            parts.append(rect(frame.x0, y + 26, x(stage.full_at) - frame.x0, 18, kind))
        if proposed and isfinite(stage.full_then):
            parts.append(line(x(stage.full_then), y + 22, x(stage.full_then), y + 48, "mark dashed"))
    at = x(capacity.rate)
    parts.append(line(at, frame.y1 - 10, at, frame.y0, "mark"))
    parts.append(_beside(frame, at, frame.y1 - 6, f"offered {words.number(capacity.rate, 'req/s')}", "strong"))
    parts += names  # over the line, which may cross them
    if proposed:
        parts.append(text(frame.x0, frame.y0 + 36, "dashed: as proposed", "axis"))
    description = ". ".join(
        f"{stage.name} is full at {words.number(stage.full_at, 'requests per second')}" for stage in capacity.stages
    )
    return figure("stages", frame, "Stage capacity against load", description + ".", parts)


def surface(frame: Frame, capacity: CapacityView) -> str:
    """Lambda_max over threshold and local prefill nodes: the darker, the more the fleet carries."""
    data = capacity.surface
    row = min(30.0, max(8.0, 260.0 / len(data.prefill)))
    right = 58.0 if row >= LINE_PX else 12.0
    frame = Frame(frame.name, frame.width, 62 + row * len(data.prefill) + 48, 56 if frame.wide else 40, right, 62, 48)
    x = Log(data.thresholds[0], data.thresholds[-1], frame.x0, frame.x1)
    most = max(value for _, value in data.peaks) or 1.0
    edges = _cell_edges(data, x)
    parts = []
    every = max(1, round(LINE_PX / row + 0.49))
    rows = zip(data.prefill, data.values, data.peaks, strict=True)
    for index, (nodes, values, (_, peak)) in enumerate(rows):
        y = frame.y0 - (index + 1) * row
        for (begin, end), value in zip(edges, values, strict=True):
            # squared, for what matters is how the best points differ
            parts.append(rect(begin, y, end - begin, row - 1, "cell", (value / most) ** 2))
        if index % every == 0:
            parts.append(text(frame.x0 - 8, y + row / 2 + 4, f"{nodes}", "axis", "end"))
        if row >= LINE_PX:
            parts.append(text(frame.x1 + 8, y + row / 2 + 4, words.number(peak), "axis"))
    parts += [
        text(x(tick), frame.y0 + 20, words.tokens(tick), "axis", "middle")
        for tick in decades(data.thresholds[0], data.thresholds[-1], 10 if frame.wide else 6)
    ]
    parts.append(text(frame.x1, frame.y0 + 40, "threshold, tokens", "axis", "end"))
    parts.append(text(frame.x0 - 8 if frame.wide else 2, frame.y1 - 8, "local prefill nodes", "axis"))
    if row >= LINE_PX:
        parts.append(text(frame.width - 4, frame.y1 - 8, "best, req/s", "axis", "end"))
    parts += _points(frame, x, row, capacity)
    description = (
        f"Now {words.number(capacity.now.lambda_max, 'requests per second')} with {sum(capacity.now.prefill)} local "
        f"prefill nodes; the best point carries {words.number(capacity.best.lambda_max)} with "
        f"{sum(capacity.best.prefill)} at a threshold of {words.tokens(capacity.best.threshold)} tokens."
    )
    return figure("surface", frame, "Capacity over threshold and split", description, parts)


def _cell_edges(data: Surface, x: Log) -> list[tuple[float, float]]:
    middles = [x(t) for t in data.thresholds]
    between = [(a + b) / 2 for a, b in pairwise(middles)]
    bounds = [float(round(bound)) for bound in (x.start, *between, x.end)]
    return list(pairwise(bounds))


def _points(frame: Frame, x: Log, row: float, capacity: CapacityView) -> list[str]:
    """The present and the best point, named above the plot in the colours of their dots."""

    def place(prefill: int) -> float:
        rows = capacity.surface.prefill
        nearest = min(range(len(rows)), key=lambda i: abs(rows[i] - prefill))
        return frame.y0 - (nearest + 0.5) * row - 0.5

    now, best = capacity.now, capacity.best
    radius = min(7.0, max(4.0, row / 2 - 3))
    at = [(x(point.threshold), place(sum(point.prefill))) for point in (now, best)]
    parts = [
        f'<circle cx="{at[1][0]:.1f}" cy="{at[1][1]:.1f}" r="{radius:.1f}" class="best"/>',
        f'<circle cx="{at[0][0]:.1f}" cy="{at[0][1]:.1f}" r="{radius:.1f}" class="now"/>',
    ]
    for i, (name, point, kind) in enumerate((("now", now, "now"), ("best", best, "best"))):
        label = f"{name} {words.number(point.lambda_max, 'req/s')}"
        left = 10 + i * (30 + room("now 3.22 req/s"))
        parts += [f'<circle cx="{left:.1f}" cy="16" r="6" class="{kind}"/>', text(left + 12, 21, label)]
    return parts
