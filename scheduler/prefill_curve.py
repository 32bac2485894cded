"""A node's prefill time over prompt length, learnt from finished prefills: T = fixed + tokens + squares of positions.

Attention makes T convex, so one rate would be right at one length only. Observations of like length are averaged in a
bin, and the curve is the weighted least squared relative error through the bins. A curve through lengths that lie
close together says nothing of others: how many terms are fitted follows from how far the lengths are apart, and until
they are, what the node claims is one more point, unless it contradicts what was seen.
"""

from __future__ import annotations

from itertools import combinations
from math import inf, log2

import msgspec

from scheduler.facts import PrefillCurve

SMOOTHING = 0.15
BINS_PER_OCTAVE = 1
SPREAD_FOR = (1.0, 2.0, 8.0)
"""The longest over the shortest length that one, two and three terms take."""
FADE = 0.97
"""What a bin weighs less for each prefill that was seen since it last had one."""
BETTER = 0.7
"""A further term must leave less than this share of the error: noise alone would always take one more."""
CLAIM_WEIGHT = 0.3
CONTRADICTED = 0.01
"""A claim that makes the curve miss what was seen by more than 10 % is not believed."""
TELLING_TOKENS = 256
"""A prefill of fewer tokens is mostly fixed cost; what it teaches counts in proportion."""
DRIFT, LASTS = 0.01, 16
"""The curve is fitted anew once a bin's mean is off by so much from what it was fitted to, and after so many prefills:
to fit it costs as much as many decisions take."""
MIN_TOKENS_PER_S, MAX_TOKENS_PER_S = 1e-3, 1e9
"""No node is slower or quicker: what says otherwise is no measurement, and its squares would be no numbers."""


_Point = tuple[float, float, float, float]
"""Tokens, squares, seconds, weight."""


class _Bin(msgspec.Struct):
    """Means of one length's prefills: tokens, squares (stop^2 - start^2), seconds. ``seen_at`` counts prefills.

    ``fitted`` are the tokens and seconds that the curve goes by.
    """

    tokens: float
    squares: float
    seconds: float
    weight: float
    seen_at: int
    count: int = 1
    fitted: tuple[float, float] = (0.0, 0.0)

    @property
    def drifted(self) -> bool:
        """Whether the curve may be off by now for what was seen here since it was fitted."""
        tokens, seconds = self.fitted
        return abs(self.tokens - tokens) > DRIFT * tokens or abs(self.seconds - seconds) > DRIFT * seconds


class PrefillTimes:
    """One node's prefills: what was observed, and what it claims while little was. None while there is neither."""

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}
        self._claimed: float | None = None
        self._seen = 0
        self._fitted_at = 0
        self._curve: PrefillCurve | None = None
        self._stale = False

    def claim(self, tokens_per_s: float) -> None:
        """What the node says of itself; 0, and whatever no node can do, is not a claim."""
        claimed = tokens_per_s if plausible_rate(tokens_per_s) else None
        if claimed != self._claimed:
            self._claimed, self._stale = claimed, True

    def observe(self, start: int, stop: int, seconds: float) -> None:
        """A finished prefill of tokens [start, stop). Events without tokens, or in no possible time, teach nothing."""
        tokens = stop - start
        if tokens <= 0 or start < 0 or not (seconds > 0 and plausible_rate(tokens / seconds)):
            return
        self._seen += 1
        squares = float(stop * stop - start * start)
        telling = min(1.0, tokens / TELLING_TOKENS)
        at = round(log2(tokens) * BINS_PER_OCTAVE)
        found = self._bins.get(at)
        if found is None:
            self._bins[at], self._stale = _Bin(tokens, squares, seconds, telling, self._seen), True
            return
        found.count += 1
        share = max(SMOOTHING, 1.0 / found.count)
        found.tokens += share * (tokens - found.tokens)
        found.squares += share * (squares - found.squares)
        found.seconds += share * (seconds - found.seconds)
        found.weight = max(telling, found.weight)
        found.seen_at = self._seen
        self._stale = self._stale or found.drifted or self._seen >= self._fitted_at + LASTS

    @property
    def curve(self) -> PrefillCurve | None:
        """What a decision may know."""
        if self._stale:
            self._curve, self._stale = self._fit(), False
        return self._curve

    @property
    def tokens_per_s(self) -> float | None:
        """The rate at the mean of the lengths seen, for people; the claim while nothing was seen."""
        curve = self.curve
        if curve is None:
            return None
        lengths = [found.tokens for found in self._bins.values()]
        typical = round(sum(lengths) / len(lengths)) if lengths else 1024
        return typical / curve.seconds(0, typical)

    def _fit(self) -> PrefillCurve | None:
        seen = [
            (found.tokens, found.squares, found.seconds, found.weight * FADE ** (self._seen - found.seen_at))
            for found in self._bins.values()
        ]
        for found in self._bins.values():
            found.fitted = found.tokens, found.seconds
        self._fitted_at = self._seen
        claim = [] if self._claimed is None else [(self._claimed, 0.0, 1.0, CLAIM_WEIGHT)]
        if not seen:
            return _through(claim) if claim else None
        lengths = [point[0] for point in seen]
        alone = _through(seen)
        if claim and (max(lengths) < TELLING_TOKENS or max(lengths) < SPREAD_FOR[1] * min(lengths)):
            together = _through(seen + claim)
            if _error(together, seen) <= _error(alone, seen) + CONTRADICTED * sum(point[3] for point in seen):
                return together
        return alone


def plausible_rate(tokens_per_s: float) -> bool:
    """Whether a node could do this."""
    return MIN_TOKENS_PER_S <= tokens_per_s <= MAX_TOKENS_PER_S


def _through(points: list[_Point]) -> PrefillCurve:
    """The curve through the points, of as many terms as their lengths allow."""
    lengths = [point[0] for point in points]
    terms = sum(max(lengths) >= spread * min(lengths) for spread in SPREAD_FOR)
    choices = _TERMS[min(terms, len(points))]
    # an error relative to the seconds seen alone would excuse any curve that is far below them
    first = _least_squares(points, choices, [s for _, _, s, _ in points])
    return _least_squares(points, choices, [max(s, _at(first, t, q)) for t, q, s, _ in points])


def _at(curve: PrefillCurve, tokens: float, squares: float) -> float:
    return curve.fixed_s + curve.token_s * tokens + curve.square_s * squares


def _error(curve: PrefillCurve, points: list[_Point]) -> float:
    """Weighted squares of what the curve is off by, relative to what was seen."""
    return sum(w * (_at(curve, t, q) / s - 1) ** 2 for t, q, s, w in points)


_TOKEN, _FIXED, _SQUARE = 1, 0, 2
_TERMS = {
    1: ((_TOKEN,),),
    2: ((_TOKEN,), (_FIXED, _TOKEN)),
    3: tuple(
        some for count in (1, 2, 3) for some in combinations((_FIXED, _TOKEN, _SQUARE), count) if some[-1] != _FIXED
    ),
}
"""The sets of terms to try, by how many may be fitted: trying all is the whole of non-negative least squares."""


def _least_squares(points: list[_Point], choices: tuple[tuple[int, ...], ...], scales: list[float]) -> PrefillCurve:
    """The curve without negative terms of least weighted squared error, each in its own scale."""
    rows = []
    for (tokens, squares, seconds, weight), scale in zip(points, scales, strict=True):
        root = weight**0.5 / scale
        rows.append(((root, root * tokens, root * squares), root * seconds))
    best, least = (0.0, points[0][2] / points[0][0], 0.0), inf
    for chosen in choices:
        solved = _solve(rows, chosen)
        if solved is None or min(solved) < 0:
            continue
        terms = [0.0, 0.0, 0.0]
        for term, value in zip(chosen, solved, strict=True):
            terms[term] = value
        error = sum((sum(a * b for a, b in zip(row, terms, strict=True)) - y) ** 2 for row, y in rows)
        if error < BETTER * least - 1e-6:
            best, least = (terms[0], terms[1], terms[2]), error
    return PrefillCurve(*best)


def _solve(rows: list[tuple[tuple[float, float, float], float]], chosen: tuple[int, ...]) -> list[float] | None:
    """Normal equations of the chosen columns by elimination, each column scaled to 1; None where they are singular."""
    scale = [max(sum(row[c] ** 2 for row, _ in rows) ** 0.5, 1e-300) for c in chosen]
    n = len(chosen)
    matrix = [
        [sum(row[a] * row[b] for row, _ in rows) / scale[i] / scale[j] for j, b in enumerate(chosen)]
        + [sum(row[a] * y for row, y in rows) / scale[i]]
        for i, a in enumerate(chosen)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(matrix[r][i]))
        if abs(matrix[pivot][i]) < 1e-9:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for r in range(n):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [x - factor * y for x, y in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] / scale[i] for i in range(n)]
