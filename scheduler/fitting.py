"""A profile from observations: what answered requests took, by term, made into curves.

Observations are whatever traffic there was, so every fit is one of least absolute deviations: a request that was held
up by something else does not bend it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from scheduler.facts import PrefillCurve, SizeFacts
from scheduler.lengths import FloatArray
from scheduler.measured import Handling, Site
from scheduler.predict import Pace
from scheduler.sizes import last_chunk, transfer_bytes

LEAST_PREFILLS = 3
LEAST_SPREAD = 4.0
"""The longest over the shortest prefill that a curve takes."""
UNSEEN_BYTES_PER_S = 1e9
"""Of a way whose rate was never learnt."""
_ROUNDS = 30
_LEAST_OFF = 1e-4


@dataclass(frozen=True, slots=True)
class Observed:
    """One request that was answered by its first way. Times are seconds; ``at`` is its arrival by any one clock.

    It was prefilled at ``site``, ``in_place`` on the decode node or on a node for it, where ``cached`` of [0, ``stop``)
    were not computed; ``prefill_s`` is None where nobody said. [``start``, ``stop``) was sent. ``quiet``: nothing
    waited or ran on either node. ``first_at`` and ``spoken_s`` say when its ``output`` tokens came. The link was said
    to do ``bytes_per_s``, None if unmeasured; the cache was there ``exposed_s`` after all of it was computed.
    """

    at: float
    site: str
    decode_node: str
    cached: int
    start: int
    stop: int
    ttft_s: float
    in_place: bool
    prefill_s: float | None
    wire_bytes: int
    raw_bytes: int
    codec: str
    codec_s: float
    bytes_per_s: float | None
    rtt_s: float | None
    exposed_s: float
    quiet: bool
    output: int
    spoken_s: float

    @property
    def first_at(self) -> float:
        """When its first token came."""
        return self.at + self.ttft_s


def fit_curve(field: str, points: Sequence[tuple[int, int, float]]) -> tuple[PrefillCurve, float]:
    """The curve through prefills of tokens [start, stop) in seconds, and the median of what it is off by, relative.

    Raises ValueError naming ``field`` where they are too few, or too much of one length, to say.
    """
    lengths = [stop - start for start, stop, _ in points]
    if len(points) < LEAST_PREFILLS or max(lengths) < LEAST_SPREAD * min(lengths):
        spread = f", of {min(lengths)} to {max(lengths)} tokens" if lengths else ""
        raise ValueError(
            f"{field}: a curve needs at least {LEAST_PREFILLS} prefills, the longest {LEAST_SPREAD:g} times as long as "
            f"the shortest; there are {len(points)}{spread}"
        )
    start, stop, seconds = np.array(points, dtype=np.float64).T
    columns = np.stack((np.ones_like(start), stop - start, stop * stop - start * start), axis=1) / seconds[:, None]
    weights = np.ones_like(seconds)
    terms = np.zeros(3)
    for _ in range(_ROUNDS):
        terms = _non_negative(columns * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(columns @ terms - 1), _LEAST_OFF))
    off = float(np.median(np.abs(columns @ terms - 1)))
    return PrefillCurve(*(float(term) for term in terms)), off


def _non_negative(columns: FloatArray, target: FloatArray) -> FloatArray:
    """Least squares without negative terms: of so few, trying every set of them is the whole of it."""
    best, least = np.zeros(columns.shape[1]), np.inf
    scale = np.sqrt(np.sum(columns * columns, axis=0))
    for count in range(1, columns.shape[1] + 1):
        for chosen in map(list, combinations(range(columns.shape[1]), count)):
            solved = np.linalg.lstsq(columns[:, chosen] / scale[chosen], target, rcond=None)[0] / scale[chosen]
            error = float(np.sum((columns[:, chosen] @ solved - target) ** 2))
            if np.all(solved >= 0) and error < least:
                best, least = np.zeros(columns.shape[1]), error
                best[chosen] = solved
    return best


def fit_site(
    name: str, nodes: int, seen: Sequence[Observed], sizes: SizeFacts, chunk_tokens: int, first_step_s: float
) -> Site:
    """One site from the requests that were prefilled there. Raises ValueError naming it where they are too few."""
    field = f"site {name!r}"
    computed = [one for one in seen if one.stop > one.cached]
    in_place = [one for one in computed if one.in_place]
    through = [one for one in computed if not one.in_place and one.prefill_s is not None]
    points = [(one.cached, one.stop, one.prefill_s) for one in through if one.prefill_s]
    if not nodes:
        points = [(one.cached, one.stop, max(1e-4, one.ttft_s - first_step_s)) for one in in_place if one.quiet]
    curve, error = fit_curve(field, points)
    learnt = [one.bytes_per_s for one in through if one.bytes_per_s]
    shown = [_shown(one, sizes, chunk_tokens) for one in through if one.exposed_s > 0]
    trips = [one.rtt_s for one in through if one.rtt_s is not None]
    bytes_per_s = max(median(learnt or [UNSEEN_BYTES_PER_S]), median(shown or [0.0]))
    rtt_s = median(trips) if trips else 0.0
    codec = Counter(one.codec for one in through).most_common(1)[0][0] if through else ""
    ratios = [one.wire_bytes / one.raw_bytes for one in through if one.codec == codec and one.raw_bytes > 0]
    handled = [
        (one.stop, one.ttft_s - first_step_s - _explained_s(one, curve, sizes, chunk_tokens, bytes_per_s, rtt_s))
        for one in through
        if one.quiet
    ]
    if nodes and len(handled) < LEAST_PREFILLS:
        raise ValueError(
            f"{field}: only {len(handled)} of its requests found their nodes idle; it takes {LEAST_PREFILLS}"
        )
    return Site(
        name,
        nodes,
        curve,
        _line(handled),
        bytes_per_s,
        rtt_s,
        codec,
        median(ratios) if ratios else 1.0,
        len(points),
        error,
    )


def _shown(one: Observed, sizes: SizeFacts, chunk_tokens: int) -> float:
    """Bytes per second that a link did at least: the last chunk's have come ``exposed_s`` after they were computed."""
    raw = transfer_bytes(sizes, one.start, one.stop)
    _, nbytes = last_chunk(sizes, min(one.start, one.stop), one.stop, chunk_tokens)
    last_wire = one.wire_bytes * nbytes / raw if raw else 0.0
    computing = one.prefill_s or 0.0
    # some of them may have come while the rest was computed
    return last_wire / (one.exposed_s + computing * min(1.0, chunk_tokens / max(1, one.stop - one.cached)))


def _explained_s(
    one: Observed, curve: PrefillCurve, sizes: SizeFacts, chunk_tokens: int, bytes_per_s: float, rtt_s: float
) -> float:
    """What the policy's own prediction makes of this prefill's measured seconds, with nothing in its way."""
    assert one.prefill_s is not None
    tokens, nbytes = last_chunk(sizes, min(one.start, one.stop), one.stop, chunk_tokens)
    raw = transfer_bytes(sizes, one.start, one.stop)
    last_s = min(one.prefill_s, curve.seconds(one.stop - tokens, one.stop))
    pace = Pace(0.0, one.prefill_s, last_s, nbytes / raw if raw else 0.0, bytes_per_s, 0.0, rtt_s, 1.0)
    return pace.ttft_s(one.wire_bytes, one.codec_s)


def _line(points: Sequence[tuple[int, float]]) -> Handling:
    """The line of median slope (Theil and Sen) through them, without a negative term."""
    if not points:
        return Handling(0.0)
    slopes = [(b - a) / (more - less) for (less, a), (more, b) in combinations(sorted(points), 2) if more > less]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    return Handling(max(0.0, median([seconds - slope * tokens for tokens, seconds in points])), slope)


def _rising(values: FloatArray) -> FloatArray:
    """The nearest that never falls: neighbours in the wrong order are replaced by their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, n), (high, m) = pools.pop(), pools.pop()
            pools.append(((low * n + high * m) / (n + m), n + m))
    return np.array([mean for mean, count in pools for _ in range(count)])


def step_times(seen: Sequence[Observed]) -> list[tuple[float, float]]:
    """For each number of streams that was seen on one node, (how many there were on average, seconds of a step).

    Streams are as many as overlap, so ``seen`` must be all that ran meanwhile. Streams of a few tokens say nothing.
    """
    by_node: dict[str, list[Observed]] = defaultdict(list)
    for one in seen:
        by_node[one.decode_node].append(one)
    groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for streams in by_node.values():
        for one in streams:
            if one.output < 4 or one.spoken_s <= 0:
                continue
            begin, end = one.first_at, one.first_at + one.spoken_s
            shared = sum(
                max(0.0, min(end, other.first_at + other.spoken_s) - max(begin, other.first_at)) for other in streams
            )
            beside = shared / one.spoken_s
            groups[round(beside)].append((beside, one.spoken_s / (one.output - 1)))
    return [(median([n for n, _ in group]), median([s for _, s in group])) for _, group in sorted(groups.items())]


def steps(times: Sequence[tuple[float, float]], batch: int) -> tuple[float, ...]:
    """The time of a step with 0 to ``batch`` streams: straight lines between those seen, never falling.

    Beyond the most that were seen it grows as it did up to there. Raises ValueError where none was.
    """
    if not times:
        raise ValueError("step_s: no answer of at least 4 tokens was seen; ask for some")
    streams, seconds = np.array(times, dtype=np.float64).T
    seconds = _rising(seconds)
    slope = (seconds[-1] - seconds[0]) / (streams[-1] - streams[0]) if len(times) > 1 else 0.0
    at = np.arange(batch + 1, dtype=np.float64)
    found = np.interp(at, streams, seconds) + slope * np.maximum(0.0, at - streams[-1])
    return tuple(float(value) for value in found)
