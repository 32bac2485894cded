"""Counters, gauges and histograms that are plain numbers: counting costs a fraction of a microsecond, reading the rest.

The same calls as prometheus_client's own, for one thread, and without its lock, checks and creation times; a request
counts a dozen of them, a streamed answer one a chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Number:
    """One time series."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to it."""
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        """Take from it; only of gauges."""
        self.value -= amount


class Buckets:
    """One histogram's series. A value counts in the first bucket whose bound is not below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


S = TypeVar("S", Number, Buckets)


class _Family(Generic[S]):
    """The series of one name by the values of its labels. One without labels has its series from the start."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        make: Callable[[], S],
        registry: CollectorRegistry | None,
    ) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._make: Callable[[], S] = make
        self._series: dict[tuple[str, ...], S] = {}
        self._only: S | None = None if labels else self.labels()
        if registry is not None:
            registry.register(self)  # type: ignore[arg-type]

    def labels(self, *values: str) -> S:
        """The series of these values, one for each label; it stays, so that it can be kept where it is counted."""
        found: S | None = self._series.get(values)
        if found is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, got {len(values)} values")
            found = self._series[values] = self._make()
        return found

    @property
    def only(self) -> S:
        """The series of a family without labels."""
        assert self._only is not None, f"{self._name} has labels"
        return self._only


class Counter(_Family[Number]):
    """Only grows."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), registry: CollectorRegistry | None = None
    ) -> None:
        super().__init__(name, text, labels, Number, registry)

    def inc(self, amount: float = 1.0) -> None:
        """Add to the one series of a family without labels."""
        self.only.value += amount

    def collect(self) -> Iterable[Metric]:
        """As they are now."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.value)
        return [family]


class Gauge(_Family[Number]):
    """Goes up and down."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), registry: CollectorRegistry | None = None
    ) -> None:
        super().__init__(name, text, labels, Number, registry)

    def inc(self, amount: float = 1.0) -> None:
        """Add to the one series of a family without labels."""
        self.only.value += amount

    def dec(self, amount: float = 1.0) -> None:
        """Take from it."""
        self.only.value -= amount

    def collect(self) -> Iterable[Metric]:
        """As they are now."""
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.value)
        return [family]


class Histogram(_Family[Buckets]):
    """How often what size was seen. ``buckets`` are upper bounds, ascending; one without bound is added."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        registry: CollectorRegistry | None = None,
        *,
        buckets: Sequence[float],
    ) -> None:
        bounds = tuple(float(bound) for bound in buckets)
        self._bounds = (*bounds, float("inf"))
        super().__init__(name, text, labels, lambda: Buckets(bounds), registry)

    def observe(self, value: float) -> None:
        """Count a value in the one series of a family without labels."""
        self.only.observe(value)

    def collect(self) -> Iterable[Metric]:
        """As they are now."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            total, buckets = 0, []
            for bound, count in zip(self._bounds, series.counts, strict=True):
                total += count
                buckets.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]
            family.add_metric(values, buckets, series.sum)
        return [family]
