"""Where a quantiser's steps come from: the channels' means, and one step per channel or per token, as the data say.

Keys have channels of very different size and mean, values have tokens of very different size. Which of the two a piece
is shows in the mean deviations: steps follow the axis along which these are spread more widely.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvcache.codecs.arrays import LIMIT, SUM_BITS, Array, cast, floats, integer_sum, namespace, words_of
from kvcache.codecs.base import CodecError
from kvcache.layout import DType

# Below this many terms a mean or a step of 16 bits costs more than it saves.
_LEAST_TERMS = 32
_SMALLEST_STEP = 2.0**-100
# A Gaussian's standard deviation over its mean deviation.
_DEVIATION = 1.2533


class Axis(IntEnum):
    """What one step serves. The numbers are on the wire."""

    WHOLE = 0
    CHANNEL = 1
    TOKEN = 2


@dataclass(frozen=True, slots=True)
class Grid:
    """bf16 words: ``means``, one per channel or none, and ``steps``, as many as ``axis`` makes of them."""

    axis: Axis
    means: Array
    steps: Array


def counts(axis: int, rows: int, heads: int, dim: int) -> tuple[int, int]:
    """How many means and steps a piece has. Raises CodecError for an axis that no piece of this shape has."""
    if axis not in _axes(rows, dim):
        raise CodecError(f"grid: axis {axis} for {rows} rows of {heads} times {dim}")
    steps = {Axis.WHOLE: 1, Axis.CHANNEL: heads * dim, Axis.TOKEN: rows * heads}[Axis(axis)]
    return heads * dim if rows >= _LEAST_TERMS else 0, steps


def most_counts(elements: int) -> int:
    """The most means and steps together that a piece of so many elements has."""
    return 1 + 2 * (elements // _LEAST_TERMS)


def measure(values: Array, magnitude: float, top: float, part: float) -> tuple[Grid, Array]:
    """The grid of fp32 ``values`` (rows, heads, dim), and these values in its steps, within ``top`` of 0.

    ``magnitude`` is their largest. A step is ``part`` standard deviations, or larger where ``top`` steps would not
    reach the furthest value.
    """
    xp = namespace(values)
    rows, heads, dim = values.shape
    to_integers = 2.0 ** (SUM_BITS - 1) / max(magnitude, _SMALLEST_STEP)
    table = values.reshape(rows, heads * dim)
    means = words_of(table[:1, :0], DType.BFLOAT16)
    if rows >= _LEAST_TERMS:
        mean = integer_sum(xp.round(table * to_integers), 0) * (1 / (rows * to_integers))
        means = words_of(cast(mean, "float32"), DType.BFLOAT16)
        table = table - floats(means, DType.BFLOAT16)
    distance = abs(table)
    integers = xp.round(distance * to_integers)
    axes = _axes(rows, dim)
    deviations = {axis: _deviation(_by(axis, integers, dim), _SUMMED[axis]) for axis in axes}
    axis = min(axes, key=lambda candidate: _mean_root(deviations[candidate]))
    reach = xp.amax(_by(axis, distance, dim), axis=_SUMMED[axis], keepdims=True) * (1 / top)
    wanted = cast(deviations[axis] * (part * _DEVIATION / to_integers), "float32")
    steps = _rounded_up(xp.clip(xp.maximum(wanted, reach), _SMALLEST_STEP, None))
    scaled = _by(axis, table, dim) / floats(steps, DType.BFLOAT16)
    return Grid(axis, means.reshape(-1), steps.reshape(-1)), scaled.reshape(rows, heads, dim)


def restore(grid: Grid, scaled: Array) -> Array:
    """Values from values in steps, (rows, heads, dim). Raises CodecError for a grid that ``measure`` does not make."""
    xp = namespace(scaled)
    rows, heads, dim = scaled.shape
    steps, means = floats(grid.steps, DType.BFLOAT16), floats(grid.means, DType.BFLOAT16)
    if not bool(xp.all((steps > 0) & (steps <= 2 * LIMIT))) or not bool(xp.all(abs(means) <= LIMIT)):
        raise CodecError(f"grid: a mean beyond {LIMIT}, or a step that is not positive or beyond {2 * LIMIT}")
    steps = steps.reshape((1, -1) if grid.axis is Axis.CHANNEL else (-1, 1))
    table = (_by(grid.axis, scaled, dim) * steps).reshape(rows, heads * dim)
    if means.shape[0]:
        table = table + means
    return table.reshape(rows, heads, dim)


_SUMMED = {Axis.WHOLE: 1, Axis.CHANNEL: 0, Axis.TOKEN: 1}


def _axes(rows: int, dim: int) -> tuple[Axis, ...]:
    """The axes that a piece may have, the first preferred."""
    able = ((Axis.CHANNEL, rows), (Axis.TOKEN, dim))
    return tuple(axis for axis, terms in able if terms >= _LEAST_TERMS) or (Axis.WHOLE,)


def _by(axis: Axis, values: Array, dim: int) -> Array:
    """Two axes, one of which (``_SUMMED``) holds all values that share a step."""
    if axis is Axis.CHANNEL:
        return values.reshape(values.shape[0], -1)
    return values.reshape((-1, dim) if axis is Axis.TOKEN else (1, -1))


def _deviation(integers: Array, axis: int) -> Array:
    return integer_sum(integers, axis) * (1 / integers.shape[axis])


def _mean_root(deviations: Array) -> float:
    """Smaller where deviations of a given mean are spread more widely. They are at most 2**15, so the sum is exact."""
    xp = namespace(deviations)
    roots = xp.round(xp.sqrt(deviations) * 2.0 ** (SUM_BITS - 8)).reshape(-1)
    return float(integer_sum(roots, 0)[0]) / int(roots.shape[0])


def _rounded_up(steps: Array) -> Array:
    """Positive fp32 values as bf16 words, none smaller than it was."""
    return cast((steps.view(namespace(steps).int32) + 0xFFFF) >> 16, "int16")
