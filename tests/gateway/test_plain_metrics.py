"""Plain numbers are exposed exactly as prometheus_client's own would be."""

from __future__ import annotations

import prometheus_client as official
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway import plain_metrics as plain

BOUNDS = (0.01, 0.5, 10)


def exposed(kind: object) -> list[str]:
    registry = CollectorRegistry()
    counter = kind.Counter("a", "An a", ["x", "y"], registry=registry)  # type: ignore[attr-defined]
    alone = kind.Counter("alone", "One", registry=registry)  # type: ignore[attr-defined]
    gauge = kind.Gauge("g", "A g", registry=registry)  # type: ignore[attr-defined]
    histogram = kind.Histogram("h_seconds", "An h", ["x"], registry=registry, buckets=BOUNDS)  # type: ignore[attr-defined]
    quiet = kind.Histogram("quiet", "None", registry=registry, buckets=BOUNDS)  # type: ignore[attr-defined]
    counter.labels("1", 'q"\\').inc()
    counter.labels("1", 'q"\\').inc(2)
    alone.inc(0)
    gauge.inc()
    gauge.inc(3)
    gauge.dec()
    for value in (0.0, 0.01, 0.011, 0.5, 9, 10, 11):
        histogram.labels("1").observe(value)
    assert quiet is not None
    text = generate_latest(registry).decode()
    return sorted(line for line in text.splitlines() if "_created" not in line)


def test_they_read_as_the_official_ones() -> None:
    assert exposed(plain) == exposed(official)


def test_a_wrong_number_of_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="labels"):
        plain.Counter("a", "An a", ["x"]).labels("1", "2")
