"""Traffic that repeats by the day: what came at this time on the days before, if those days agree.

Time is divided into slots of a day. Each slot keeps a few days' figures. A forecast is given only where at least two
days are known and their mean prefill work and output agree, so that a single odd day moves nobody.
"""

from __future__ import annotations

from collections import deque
from math import exp, log

import msgspec
import numpy as np

from scheduler.observed_lengths import BINS_PER_OCTAVE, OCTAVES, ObservedLengths

DAY_S = 86_400.0
SLOT_S = 900.0
SLOTS = int(DAY_S / SLOT_S)
DAYS_KEPT = 7
LEAST_DAYS = 2
LEAST_REQUESTS = 100
AGREE_WITHIN = 1.25
"""Days whose mean length or output differ by more than this factor do not agree."""
_COARSE = 4
"""Bins of a kept histogram are this many of the live ones: enough to place a threshold within 9 %."""


class SlotRecord(msgspec.Struct, frozen=True):
    """One slot of one day: requests, their tokens by coarse logarithmic bin, and the mean output."""

    day: int
    slot: int
    requests: int
    output_tokens: float
    bins: dict[int, tuple[int, float]]

    @property
    def mean_length(self) -> float:
        """Tokens per request."""
        return sum(tokens for _, tokens in self.bins.values()) / self.requests


class Expected(msgspec.Struct, frozen=True):
    """What the days before say of a moment. ``rate`` is requests per second."""

    lengths: ObservedLengths
    output_tokens: float
    rate: float
    days: int


class DailyPattern:
    """Learns from what passes and forecasts. ``now`` is Unix time, so that slots are times of day."""

    def __init__(self, records: tuple[SlotRecord, ...] = ()) -> None:
        self._slots: dict[int, deque[SlotRecord]] = {}
        self._open: tuple[int, int] | None = None
        self._counts = np.zeros(BINS_PER_OCTAVE * OCTAVES // _COARSE + 1, dtype=np.int64)
        self._tokens = np.zeros(len(self._counts))
        self._emitted = self._ends = 0
        for record in records:
            self._keep(record)

    def add(self, lengths: tuple[int, ...], emitted: int, ends: int, now: float) -> SlotRecord | None:
        """Count what came since the last call; the record of a slot that this ends, for whoever stores them."""
        at = (int(now // DAY_S), int(now % DAY_S // SLOT_S))
        done = None
        if self._open is not None and at != self._open:
            done = self._close(self._open)
        self._open = at
        values = np.asarray(lengths, dtype=np.float64)
        values = values[values >= 1]
        bins = np.minimum(np.ceil(np.log2(values) * BINS_PER_OCTAVE / _COARSE), len(self._counts) - 1).astype(np.int64)
        np.add.at(self._counts, bins, 1)
        np.add.at(self._tokens, bins, values)
        self._emitted += emitted
        self._ends += ends
        return done

    def expect(self, at: float) -> Expected | None:
        """What the traffic at Unix time ``at`` should be; None where too few days are known or they differ."""
        day, slot = int(at // DAY_S), int(at % DAY_S // SLOT_S)
        known = [record for record in self._slots.get(slot, ()) if record.day < day]
        if len(known) < LEAST_DAYS:
            return None
        for figures in ([r.mean_length for r in known], [r.output_tokens for r in known]):
            if max(figures) > AGREE_WITHIN * min(figures):
                return None
        bins: dict[int, tuple[int, float]] = {}
        for record in known:
            for index, (count, tokens) in record.bins.items():
                had, had_tokens = bins.get(index, (0, 0.0))
                bins[index] = (had + count, had_tokens + tokens)
        return Expected(
            lengths=_lengths(bins),
            output_tokens=exp(sum(log(r.output_tokens) for r in known) / len(known)),
            rate=sum(r.requests for r in known) / len(known) / SLOT_S,
            days=len(known),
        )

    def _close(self, at: tuple[int, int]) -> SlotRecord | None:
        requests = int(self._counts.sum())
        record = None
        if requests >= LEAST_REQUESTS and self._ends and self._emitted:
            filled = np.flatnonzero(self._counts)
            bins = {int(i): (int(self._counts[i]), float(self._tokens[i])) for i in filled}
            record = SlotRecord(*at, requests, self._emitted / self._ends, bins)
            self._keep(record)
        self._counts[:] = 0
        self._tokens[:] = 0.0
        self._emitted = self._ends = 0
        return record

    def _keep(self, record: SlotRecord) -> None:
        self._slots.setdefault(record.slot, deque(maxlen=DAYS_KEPT)).append(record)


def _lengths(bins: dict[int, tuple[int, float]]) -> ObservedLengths:
    order = sorted(bins)
    counts = np.asarray([bins[i][0] for i in order], dtype=np.float64)
    means = np.asarray([bins[i][1] for i in order]) / counts
    edges = np.maximum(np.exp2(np.asarray(order) * _COARSE / BINS_PER_OCTAVE), means)
    return ObservedLengths(means, counts / counts.sum(), edges)
