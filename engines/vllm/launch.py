"""Entry of the vLLM server's process: ``python -m engines.vllm.launch PARENT_PID ARGUMENTS...``, in vLLM's own venv.

It ends with its node by the kernel's signal; what it starts ends with the node's socket (see ``attaching``).
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Become vLLM's API server."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    sys.argv = [SERVER, *sys.argv[2:]]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
