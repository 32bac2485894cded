"""Hypothesis on a busy machine: an example that had to wait for the processor is not a failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
