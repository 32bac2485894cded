"""What the controller believes of the traffic: a window of input lengths, one of outputs, each cut where it changed.

The mean output is tokens emitted over answers completed, of those answers that began since the last change. Means over
finished answers alone would be blind for as long as the first of the longer ones takes, which is minutes; tokens that
come without ends show it at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from scheduler.controller.changes import DISPERSION, mean_changed_at, rate_changed_at
from scheduler.controller.observation import Observation
from scheduler.lengths import FloatArray
from scheduler.observed_lengths import BINS_PER_OCTAVE, ObservedLengths

RATE_S = 120.0
"""The offered rate is taken over this much of the past."""
MOST_STEPS = 2048
LEAST_ENDS = 32
"""Fewer ends bound the mean output but do not say it."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The traffic as believed.

    ``input_error`` is the relative standard error of the mean prefill work; ``output_low`` and ``output_high`` enclose
    the mean output by the sureness asked for. ``rate`` is requests per second, ``requests`` how many the lengths rest
    on. Outputs are per request with something to prefill, as the throughput model counts requests.
    """

    lengths: ObservedLengths
    input_error: float
    output_tokens: float
    output_low: float
    output_high: float
    rate: float
    requests: int
    completions: int


@dataclass(frozen=True, slots=True)
class _Arrivals:
    lengths: FloatArray
    empty: int
    logs: tuple[float, float, float]
    """Count, sum and sum of squares of ln L."""
    heavy: tuple[float, float, float]
    """The same of L itself, so that a change of the tail shows where the mean logarithm stays."""


class _Outputs:
    """Mean output of the answers that began since ``_since``, and the account by step that shows a change."""

    def __init__(self, most_ends: int) -> None:
        self._most = most_ends
        self._steps: deque[tuple[float, int, int]] = deque()
        self._groups: dict[float, tuple[int, int]] = {}
        self._since = -inf
        self._believed: float | None = None

    def take(self, seen: Observation, began: float) -> bool:
        """Add a step that began at ``began``; whether outputs have changed."""
        self._steps.append((began, seen.tokens, seen.ends))
        while len(self._steps) > MOST_STEPS or (
            len(self._steps) > 1 and sum(ends for _, _, ends in self._steps) - self._steps[0][2] >= self._most
        ):
            self._steps.popleft()
        for part in seen.spoken:
            tokens, ends = self._groups.get(part.begun, (0, 0))
            if part.begun >= self._since:
                self._groups[part.begun] = (tokens + part.tokens, ends + part.ends)
        place = rate_changed_at([ends for _, _, ends in self._steps], [tokens for _, tokens, _ in self._steps])
        if place is not None:
            for _ in range(place):
                self._steps.popleft()
            self._forget(self._steps[0][0])
        ends = sum(ends for _, ends in self._groups.values())
        for begun in sorted(self._groups):
            ends -= self._groups[begun][1]
            if ends < self._most and len(self._groups) <= MOST_STEPS:
                break
            self._forget(begun + 1e-9)
        return place is not None

    def _forget(self, since: float) -> None:
        self._since = max(self._since, since)
        self._groups = {begun: group for begun, group in self._groups.items() if begun >= self._since}

    def believe(self, sureness: float) -> tuple[float, float, float, int] | None:
        """Mean, its bounds, and the ends that they rest on; None before the first ``LEAST_ENDS``.

        Few ends since a change leave the mean where it was, as far as the bounds allow.
        """
        tokens = sum(tokens for tokens, _ in self._groups.values())
        ends = sum(ends for _, ends in self._groups.values())
        spread = sureness * sqrt(DISPERSION * ends)
        # an answer has a token at least, though nothing was spoken since a change that was just seen
        low = max(1.0, tokens / (ends + spread + max(sureness**2, 1.0)))
        high = max(1.0, tokens / (ends - spread)) if ends > spread else inf
        if ends >= LEAST_ENDS:
            self._believed = tokens / ends
        elif self._believed is not None:
            self._believed = min(max(self._believed, low), high)
        return None if self._believed is None else (self._believed, low, high, ends)


class Traffic:
    """Takes observations, gives an ``Outlook``."""

    def __init__(self, window_requests: int, least_requests: int) -> None:
        self._window = window_requests
        self._least = least_requests
        self._arrivals: deque[_Arrivals] = deque()
        self._recent: deque[tuple[float, float, int]] = deque()
        self._outputs = _Outputs(window_requests)
        self._last: float | None = None

    def observe(self, seen: Observation, now: float) -> tuple[str, ...]:
        """Take one step's figures; says what has changed, if anything."""
        began = now if self._last is None else self._last
        self._last = now
        every = np.asarray(seen.lengths, dtype=np.float64)
        lengths = every[every >= 1]
        self._arrivals.append(
            _Arrivals(lengths, len(every) - len(lengths), _moments(np.log(lengths)), _moments(lengths))
        )
        if began < now:  # nobody knows how long the first step's arrivals took to come
            self._recent.append((began, now, len(lengths)))
        while len(self._recent) > 1 and self._recent[0][1] <= now - RATE_S:
            self._recent.popleft()
        held = sum(len(step.lengths) for step in self._arrivals)
        while len(self._arrivals) > 1 and (
            held - len(self._arrivals[0].lengths) >= self._window or len(self._arrivals) > MOST_STEPS
        ):
            held -= len(self._arrivals.popleft().lengths)
        said = []
        if self._cut_inputs():
            said.append("input lengths have changed")
        if self._outputs.take(seen, began):
            said.append("output lengths have changed")
        return tuple(said)

    def outlook(self, sureness: float) -> Outlook | None:
        """What is believed now; None while too little has been seen."""
        outputs = self._outputs.believe(sureness)
        lengths = np.concatenate([step.lengths for step in self._arrivals]) if self._arrivals else np.zeros(0)
        if len(lengths) < self._least or outputs is None:
            return None
        per_request = 1 + sum(step.empty for step in self._arrivals) / len(lengths)
        mean, low, high, ends = outputs
        seconds = self._recent[-1][1] - self._recent[0][0] if self._recent else 0.0
        return Outlook(
            lengths=binned(lengths),
            input_error=float(np.std(lengths) / np.mean(lengths)) / sqrt(len(lengths)),
            output_tokens=mean * per_request,
            output_low=low * per_request,
            output_high=high * per_request,
            rate=sum(count for _, _, count in self._recent) / seconds if seconds > 0 else 0.0,
            requests=len(lengths),
            completions=ends,
        )

    def _cut_inputs(self) -> bool:
        places = [
            mean_changed_at(*zip(*(getattr(step, name) for step in self._arrivals), strict=True))
            for name in ("logs", "heavy")
        ]
        place = max((at for at in places if at is not None), default=0)
        for _ in range(place):
            self._arrivals.popleft()
        return place > 0


def _moments(values: FloatArray) -> tuple[float, float, float]:
    return float(len(values)), float(np.sum(values)), float(np.sum(values * values))


def binned(lengths: FloatArray) -> ObservedLengths:
    """The lengths in the bins of a ``LengthHistogram``, each counted once."""
    bins = np.ceil(np.log2(lengths) * BINS_PER_OCTAVE).astype(np.int64)
    filled, where = np.unique(bins, return_inverse=True)
    counts = np.bincount(where).astype(np.float64)
    means = np.bincount(where, weights=lengths) / counts
    edges = np.maximum(np.exp2(filled / BINS_PER_OCTAVE), means)
    return ObservedLengths(means, counts / len(lengths), edges)
