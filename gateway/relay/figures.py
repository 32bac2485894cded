"""Figures of relayed requests: plain numbers while they run, read at every scrape; what all requests have is shared."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric

from gateway.metrics import Metrics
from gateway.relay.usage import Usage


class EngineFigures:
    """Of one engine. ``outcomes`` are tries by what they came to."""

    __slots__ = ("outcomes", "pieces")

    def __init__(self) -> None:
        self.pieces = 0
        self.outcomes: dict[str, int] = {}

    def count(self, outcome: str) -> None:
        """A try ended so."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


class RelayFigures:
    """Of all engines; one collector."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._running = metrics.running.only
        self._spoken = metrics.prompt_tokens.only, metrics.generation_tokens.only, metrics.cached_tokens.only
        self._of: dict[str, EngineFigures] = {}
        self.retries = 0

    def engine(self, name: str) -> EngineFigures:
        """Of that engine."""
        found = self._of.get(name)
        if found is None:
            found = self._of[name] = EngineFigures()
        return found

    def began(self) -> None:
        """A request is served from now on."""
        self._running.value += 1

    def first(self, route: str, seconds: float) -> None:
        """The first byte of an answer left so long after its request came."""
        self._metrics.ttft.labels(route).observe(seconds)

    def ended(self, path: str, route: str, status: int, seconds: float) -> None:
        """A request that began is over."""
        self._running.value -= 1
        self._metrics.duration.labels(path).observe(seconds)
        self._metrics.requests.labels(path, route, str(status)).inc()

    def spoke(self, usage: Usage | None, events: int) -> None:
        """An answer of so many tokens, by the engine's own count where it gave one."""
        prompt, generation, cached = self._spoken
        if usage is None:
            generation.value += events
            return
        prompt.value += usage.prompt
        generation.value += usage.completion
        cached.value += usage.cached

    def collect(self) -> Iterable[Metric]:
        """The families of now."""
        tries = CounterMetricFamily("prfaas_relay_tries", "Tries by what they came to", labels=["engine", "outcome"])
        pieces = CounterMetricFamily("prfaas_relay_pieces", "Reads of answers passed on", labels=["engine"])
        retries = CounterMetricFamily("prfaas_relay_retries", "Tries after the first", value=self.retries)
        for name, figures in self._of.items():
            pieces.add_metric([name], figures.pieces)
            for outcome, count in figures.outcomes.items():
                tries.add_metric([name, outcome], count)
        return [tries, pieces, retries]
