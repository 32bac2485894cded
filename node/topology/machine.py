"""How discovery looks at a machine: files, folders and commands, each of which may be missing."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 16
MAX_OUTPUT_BYTES = 4 << 20
COMMAND_TIMEOUT_S = 10.0
"""nvidia-smi takes seconds where it has to wake the driver up, and hangs on a GPU that fell off the bus."""


class Machine(Protocol):
    """What is asked of a machine; None and () where something is not there or cannot be read."""

    @property
    def hostname(self) -> str:
        """Its own name."""

    def read(self, path: str) -> str | None:
        """A small text file, without the space around it."""

    def names(self, path: str) -> Sequence[str]:
        """What a folder holds, in order of name."""

    def run(self, *command: str) -> str | None:
        """What a command prints; None where it is not there, fails, or takes too long."""


class ThisMachine:
    """The machine that this process runs on."""

    @property
    def hostname(self) -> str:
        """As the kernel has it."""
        return socket.gethostname()

    def read(self, path: str) -> str | None:
        """The first 64 KiB. Some files of sysfs exist and yet cannot be read: a link that is down has no speed."""
        try:
            with Path(path).open("rb") as file:
                return file.read(MAX_FILE_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> Sequence[str]:
        """Empty where there is no such folder."""
        try:
            return sorted(os.listdir(path))
        except OSError:
            return ()

    def run(self, *command: str) -> str | None:
        """Run within a deadline, with the C locale."""
        try:
            done = subprocess.run(  # noqa: S603 (a fixed list of commands, no shell)
                command,
                capture_output=True,
                timeout=COMMAND_TIMEOUT_S,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except FileNotFoundError:
            return None
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("%s: %s", command[0], error)
            return None
        if done.returncode != 0:
            log.warning("%s ended with %d", " ".join(command), done.returncode)
            return None
        return done.stdout[:MAX_OUTPUT_BYTES].decode(errors="replace")
