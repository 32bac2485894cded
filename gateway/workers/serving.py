"""Running several gateways on one port."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from gateway.config import ConfigError, GatewayConfig
from gateway.serve import serve
from gateway.workers.supervisor import Misconfigured, Supervisor
from gateway.workers.worker import Worker, first_state, reserve

GRACE_S = 15.0
"""Beyond what requests have to end: then a worker is killed."""


def serve_workers(config: GatewayConfig, reread: Callable[[], GatewayConfig]) -> int:
    """Until a signal; returns the exit status. Raises ConfigError where they cannot even be started."""
    if config.redis is None:
        raise ConfigError("--workers: several processes share what they know over Redis: give --redis URL")
    if config.handover is not None:
        raise ConfigError("--workers and --handover: the port is shared, not handed over; leave one of them out")
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-workers-") as found,
        reserve(config.host, config.port, True) as kept,
    ):
        port = kept.getsockname()[1]
        first_state(config, config.workers)

        def work(number: int) -> None:
            worker = Worker(number, config.workers, port, config.port == 0, Path(found))
            try:
                serve(worker.config(config), lambda: worker.config(reread()), worker)
            except ConfigError as error:
                print(f"Error: worker {number}: {error}", file=sys.stderr, flush=True)
                raise Misconfigured from error

        return Supervisor(config.workers, work, config.linger_s + config.drain_s + GRACE_S).run()
