"""What the gateway's process itself has open and runs: what grows there without end is a leak."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric


class ProcessGauges:
    """Read at scrape time, on the event loop."""

    def collect(self) -> Iterable[Metric]:
        """The families of now."""
        files = len(os.listdir("/proc/self/fd")) - 1  # but for the one that lists them
        yield GaugeMetricFamily("process_open_fds", "Open file descriptors", value=files)
        yield GaugeMetricFamily("prfaas_tasks", "Tasks of the event loop", value=len(asyncio.all_tasks()))
