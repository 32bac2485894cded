"""The plots over time: percentiles of TTFT, and what left each cluster against what its link carries."""

from __future__ import annotations

from math import isfinite

from gateway.report import words
from gateway.report.svg import LINE_PX, Frame, Linear, apart, cross, figure, line, nice, path, text, ticks
from scheduler.report.conversions import ConversionEffect
from scheduler.report.egress import ClusterUse, Egress
from scheduler.report.latency import Latency
from scheduler.report.requests import Window

WIDE = Frame("wide", 880, 320, 56, 64, 40, 48)
NARROW = Frame("narrow", 340, 280, 44, 44, 40, 48)
_CLOCK_STEPS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def percentiles(frame: Frame, window: Window, latency: Latency, conversions: tuple[ConversionEffect, ...]) -> str:
    """Three lines; a slice in which too many had no first token is a cross at the top."""
    curves = [
        (name, kind, [(one.at + latency.slice_s / 2, getattr(one, name.lower())) for one in latency.slices])
        for name, kind in (("P50", "p50"), ("P90", "p90"), ("P99", "p99"))
    ]
    finite = [value for _, _, points in curves for _, value in points if value is not None and isfinite(value)]
    top = max(finite, default=1.0) * 1.08
    x, y = _time(frame, window), Linear(0, top, frame.y0, frame.y1)
    parts = _levels(frame, y, top, "s")
    parts += _clock(frame, x, window)
    for effect in conversions:
        change = effect.conversion
        if change.ended is not None and window.since <= change.ended <= window.until:
            parts.append(line(x(change.ended), frame.y1, x(change.ended), frame.y0, "event"))
    parts.append(text(frame.x0, frame.y1 - 22, "seconds to the first token", "axis"))
    ends = []
    for rank, (name, kind, points) in enumerate(reversed(curves)):
        parts += _curve(x, y, points, kind, frame.y1 + rank * 12)
        last = next((value for _, value in reversed(points) if value is not None), None)
        if last is not None:
            ends.append((name, kind, y(last)))
    places = apart([place for _, _, place in ends], LINE_PX, frame.y1, frame.y0)
    for (name, kind, _), place in zip(ends, places, strict=True):
        parts.append(text(frame.x1 + 8, place + 4, name, f"{kind}-text strong"))
    description = (
        f"P50 {words.seconds(latency.p50)}, P90 {words.seconds(latency.p90)} over the window; "
        f"{latency.unanswered} requests had no first token."
    )
    return figure("ttft", frame, "Time to first token over time", description, parts)


def _curve(x: Linear, y: Linear, points: list[tuple[float, float | None]], kind: str, crosses_at: float) -> list[str]:
    """Pieces of a line between what is not known; infinite values as crosses at the top."""
    parts, piece = [], []
    for at, value in [*points, (0.0, None)]:
        if value is not None and isfinite(value):
            piece.append((x(at), y(value)))
            continue
        if len(piece) > 1:
            parts.append(path(piece, f"line {kind}"))
        elif piece:
            parts.append(f'<circle cx="{piece[0][0]:.1f}" cy="{piece[0][1]:.1f}" r="2.5" class="line {kind}"/>')
        piece = []
        if value is not None:
            parts.append(cross(x(at), crosses_at, f"line {kind}"))
    return parts


def link_use(frame: Frame, window: Window, found: Egress, cluster: ClusterUse, index: int) -> str:
    """One cluster's egress as an area under its link's rate."""
    frame = Frame(frame.name, frame.width, frame.height - 60, frame.left, 24 if frame.wide else 12, 40, 48)
    bound = cluster.capacity_gbps
    top = max(bound or 0.0, cluster.peak_gbps, 1e-9) * 1.12
    x, y = _time(frame, window), Linear(0, top, frame.y0, frame.y1)
    parts = _levels(frame, y, top, "Gbps")
    parts += _clock(frame, x, window)
    points = []
    for i, rate in enumerate(cluster.slices):
        begin = window.since + i * found.slice_s
        points += [(x(begin), y(rate)), (x(begin + found.slice_s), y(rate))]
    parts += [path(points, "area", close_at=frame.y0), path(points, "line away-line")]
    name = cluster.name if len(cluster.name) <= 24 else cluster.name[:23] + "…"
    parts.append(text(frame.x0, frame.y1 - 22, name, "strong"))
    if bound is not None:
        which = "link" if bound == cluster.link_gbps else "limit"
        parts.append(line(frame.x0, y(bound), frame.x1, y(bound), "mark"))
        parts.append(text(frame.x1, frame.y1 - 22, f"{which} {words.number(bound, 'Gbps')}", "strong", "end"))
    else:
        parts.append(text(frame.x1, frame.y1 - 22, "link not measured", "axis", "end"))
    description = f"{words.number(cluster.mean_gbps, 'Gbps')} on average, {words.number(cluster.peak_gbps)} at most."
    return figure(f"egress-{index}", frame, f"Egress of {cluster.name}", description, parts)


def _time(frame: Frame, window: Window) -> Linear:
    return Linear(window.since, window.until, frame.x0, frame.x1)


def _levels(frame: Frame, y: Linear, top: float, unit: str) -> list[str]:
    parts = []
    for tick in ticks(top, 4):
        parts.append(line(frame.x0, y(tick), frame.x1, y(tick), "grid" if tick else "base"))
        parts.append(text(frame.x0 - 8, y(tick) + 4, f"{tick:g}", "axis", "end"))
    parts.append(text(frame.x0 - 8, frame.y0 + 20, unit, "axis", "end"))
    return parts


def _clock(frame: Frame, x: Linear, window: Window) -> list[str]:
    """Times of day in UTC, on round steps."""
    wanted = window.seconds / (8 if frame.wide else 3)
    step = next((step for step in _CLOCK_STEPS if step >= wanted), nice(wanted))
    at = window.since + (-window.since) % step
    parts = []
    while at <= window.until:
        if frame.x0 + 16 < x(at) < frame.x1 - 8:
            parts.append(text(x(at), frame.y0 + 20, words.clock(at, step < 60), "axis", "middle"))
        at += step
    parts.append(text(frame.x1, frame.y0 + 40, f"UTC, {words.moment(window.since)[:10]}", "axis", "end"))
    return parts
