"""Every format that can be read, by the name a user gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from scheduler.simulator.traces.azure import azure
from scheduler.simulator.traces.bailian import bailian
from scheduler.simulator.traces.burstgpt import burstgpt
from scheduler.simulator.traces.decisions import decisions
from scheduler.simulator.traces.mooncake import mooncake
from scheduler.simulator.traffic import Traffic

FORMATS: Mapping[str, Callable[[Iterable[str]], Traffic]] = {
    "mooncake": mooncake,
    "azure": azure,
    "burstgpt": burstgpt,
    "bailian": bailian,
    "decisions": decisions,
}
