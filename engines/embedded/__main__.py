"""Entry of the engine process: ``python -m engines.embedded CHANNEL_FD POOL_FD PAGE_BYTES PAGES PARENT_PID SPEC``.

It ends with its node: by the kernel's signal when the parent dies, and when the channel closes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from engines.channel import ChannelError, EngineChannel
from engines.embedded.allowed import check_model_type, check_rope
from engines.protocol import Command, Loading, Pulse
from engines.spec import REFUSAL, EngineSpec
from kvcache.hostpool import HostPool
from kvcache.layout_configs import read_config

PULSE_S = 0.5
PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Load, check, serve. Returns an exit status only when the model is refused."""
    channel_fd, pool_fd, page_bytes, pages, parent = (int(argument) for argument in arguments[:5])
    spec = EngineSpec.from_json(arguments[5])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    channel = EngineChannel(socket.socket(fileno=channel_fd))
    inbox: queue.Queue[Command] = queue.Queue(maxsize=4 * spec.max_jobs)
    threading.Thread(target=_listen, args=(channel, inbox), daemon=True, name="commands").start()
    pool = HostPool(pool_fd, page_bytes, pages)
    try:
        config = read_config(spec.model_dir)
        check_model_type(config)
        check_rope(config)
        channel.send(Loading("import", 0.0))
        from engines.embedded.start import start

        loop, info = start(spec, config, pool, inbox, channel.send)
    except Exception as error:  # whatever a model directory holds, its operator reads one line
        if not isinstance(error, ValueError | OSError):
            traceback.print_exc()
        print(f"{REFUSAL} {spec.model_dir}: {str(error) or type(error).__name__}".replace("\n", " "), file=sys.stderr)
        return 2
    channel.send(info)
    threading.Thread(target=_pulse, args=(channel, lambda: loop.pulse), daemon=True, name="pulse").start()
    loop.run()
    return 0


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _listen(channel: EngineChannel, inbox: queue.Queue[Command]) -> None:
    """Hand commands to the loop; a closed channel means that the node is gone and nobody needs this process."""
    try:
        while (command := channel.receive()) is not None:
            inbox.put(command)
    except ChannelError as error:
        print(f"the node broke the protocol: {error}", file=sys.stderr, flush=True)
        os._exit(3)
    os._exit(0)


def _pulse(channel: EngineChannel, pulse: Callable[[], Pulse]) -> None:
    while True:
        channel.send(pulse())
        time.sleep(PULSE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
