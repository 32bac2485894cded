"""Commands that stand in for ours, to be run through the leash."""

from __future__ import annotations

import signal
import sys
import time


def sleeper() -> None:
    """Say that it is ready and sleep, stopping when asked to."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"{sys.argv[1]} ready", flush=True)
    time.sleep(60)


def deaf() -> None:
    """Sleep and ignore every polite request to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf ready", flush=True)
    time.sleep(60)


def broken() -> None:
    """Fail at once."""
    sys.exit("no such model: /nowhere")
