"""A vLLM server's processes: started in a session of their own, watched, and ended together with what they leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import engines
import kvcache
from engines.vllm.spec import VllmSpec

log = logging.getLogger(__name__)

KEPT_LINES = 30
LINE_CHARS = 400
GRACE_S = 5.0


class VllmProcess:
    """All that one start of vLLM brought to life. The last lines that it wrote are kept: they name causes."""

    def __init__(self, directory: Path, child: asyncio.subprocess.Process) -> None:
        """Use ``start``."""
        self._directory = directory
        self._child = child
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, spec: VllmSpec, directory: Path) -> VllmProcess:
        """Start a server that uses ``directory`` (see ``private_directory``). Raises OSError."""
        packages = _link_packages(directory / "packages")
        child = await asyncio.create_subprocess_exec(
            *spec.command(api_socket(directory), worker_socket(directory), event_socket(directory)),
            env=spec.environment(packages),
            cwd=directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(directory, child)

    @property
    def pid(self) -> int:
        """The API server's process id; the others are in its session."""
        return self._child.pid

    async def status(self, within_s: float | None) -> int | None:
        """The API server's exit status, awaited; None where it still runs then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._child.wait()
        return self._child.returncode

    async def end(self, gently: bool) -> str:
        """End all processes, remove what they left in shared memory and the directory; what was said last. Idempotent.

        ``gently`` gives vLLM ``GRACE_S`` to do so itself.
        """
        left = shared_memory(self.pid)
        if gently and self._child.returncode is None:
            self._child.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._child.wait()
        for pid in session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._child.wait()
        await asyncio.wait((self._reading,), timeout=0.5)
        for file in left:
            file.unlink(missing_ok=True)
        shutil.rmtree(self._directory, ignore_errors=True)
        return self.last_words()

    def last_words(self) -> str:
        """Why it ended, if it said so, else the last lines that it wrote."""
        causes = [line for line in self._lines if "Error" in line or "cannot" in line]
        return " | ".join(causes[-3:] or list(self._lines)[-3:])

    async def _read(self) -> None:
        assert self._child.stdout is not None
        rest = b""
        while data := await self._child.stdout.read(4096):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace").strip()[:LINE_CHARS]
                if text:
                    self._lines.append(text)
                    log.debug("vllm pid=%d %s", self.pid, text)
            rest = rest[:LINE_CHARS]


def _link_packages(directory: Path) -> Path:
    """What vLLM's Python imports of ours, and nothing that lies beside it: that is of another venv."""
    directory.mkdir()
    for package in (engines, kvcache):
        (directory / package.__name__).symlink_to(Path(package.__path__[0]).resolve())
    return directory


def private_directory() -> Path:
    """A directory for sockets that nobody else on this machine reaches, with a path short enough for them."""
    return Path(tempfile.mkdtemp(prefix="prfaas-vllm-"))


def api_socket(directory: Path) -> Path:
    """Where vLLM's API listens."""
    return directory / "api"


def worker_socket(directory: Path) -> Path:
    """Where the node listens for vLLM's workers."""
    return directory / "workers"


def event_socket(directory: Path) -> Path:
    """Where vLLM publishes its KV events."""
    return directory / "events"


def session(leader: int) -> Iterator[int]:
    """All live processes of a session."""
    yield from (pid for pid, state in _states(leader) if state not in "ZX")


def is_stopped(leader: int) -> bool:
    """Whether a process of a session is stopped, by a signal or by a debugger."""
    return any(state in "Tt" for _, state in _states(leader))


def _states(leader: int) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, *numbers = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(numbers[2]) == leader:
                    yield int(entry.name), state


def shared_memory(leader: int) -> set[Path]:
    """Named shared memory that processes of a session have open: killed, they leave it behind."""
    found = set()
    for pid in session(leader):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.partition("/dev/shm/")[2]  # noqa: S108 (where the system keeps it)
                if path.startswith("psm_") and "/" not in path and not path.endswith(" (deleted)"):
                    found.add(Path("/dev/shm") / path)  # noqa: S108
    return found
