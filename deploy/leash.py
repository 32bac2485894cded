"""Run one of our commands so that it cannot outlive whoever started it, kill -9 included.

``python -m deploy.leash PARENT_PID MODULE:COMMAND [ARGS]``. The kernel sends the child SIGKILL when the thread that
started it ends; engines watch their node in turn, so a whole tree goes. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import import_module

PR_SET_PDEATHSIG = 1


def tie_to_parent(parent: int) -> None:
    """Die with ``parent``. Exits at once where it is already gone; raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the kernel was told
        sys.exit("prfaas: the process that started this one has ended")


def main() -> None:
    """Entry point of ``python -m deploy.leash``."""
    tie_to_parent(int(sys.argv[1]))
    module, _, name = sys.argv[2].partition(":")
    command = getattr(import_module(module), name)
    sys.argv = [f"prfaas {name}", *sys.argv[3:]]
    command()


if __name__ == "__main__":
    main()
