"""One gateway takes over from another on the same machine, without a connection lost: it is given the listening socket.

The successor connects to a UNIX socket that its predecessor holds, gets the open listening socket, starts, and says so.
Only then does the predecessor stop accepting, tell the nodes, and finish what it has. The socket that clients connect
to is never closed, so its queue loses nobody. A successor that does not come up leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from gateway.config import ConfigError

log = logging.getLogger(__name__)

CONNECT_S = 5.0
START_S = 120.0
"""How long a successor may take from being given the socket to serving: it reads a model's tokeniser meanwhile."""
_READY = b"ready"


class Successor:
    """The side that takes over: ``listener`` is the predecessor's socket; ``ready`` lets it go."""

    def __init__(self, link: socket.socket, listener: socket.socket) -> None:
        self._link = link
        self.listener = listener

    @classmethod
    def take(cls, path: Path) -> Successor | None:
        """From whoever holds ``path``; None where nobody does. Raises ConfigError where it cannot be had."""
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(CONNECT_S)
        try:
            link.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):  # never there, or its holder is gone
            link.close()
            return None
        except OSError as error:
            link.close()
            raise ConfigError(f"--handover {path}: {error.strerror or error}") from error
        try:
            _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        except OSError as error:
            link.close()
            raise ConfigError(f"--handover {path}: the gateway there gives nothing: {error}") from error
        if not descriptors:
            link.close()
            raise ConfigError(f"--handover {path}: the gateway there is ending already; try again when it has")
        return cls(link, socket.socket(fileno=descriptors[0]))

    def ready(self) -> None:
        """It serves: the predecessor may stop."""
        with contextlib.suppress(OSError):  # its death is no hindrance
            self._link.sendall(_READY)
        self._link.close()

    def close(self) -> None:
        """It does not come up after all. Idempotent, also after ``ready``."""
        self._link.close()


class Offer:
    """The side that will be taken over from. ``taken`` is called once, when a successor serves."""

    def __init__(self, path: Path, listener: socket.socket, taken: Callable[[], None]) -> None:
        self._path = path
        self._listener = listener
        self._taken = taken
        self._server: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._inode = 0

    def start(self) -> None:
        """Hold ``path`` from now on, in place of whoever held it. Raises ConfigError."""
        mine = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        server = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)  # whoever can connect gets the port
        try:
            server.bind(str(mine))
            server.listen(1)
            self._inode = mine.stat().st_ino
            mine.replace(self._path)
        except OSError as error:
            server.close()
            raise ConfigError(f"--handover {self._path}: {error.strerror or error}") from error
        finally:
            os.umask(before)
        server.setblocking(False)
        self._server = server
        self._task = asyncio.create_task(self._serve(server))

    async def stop(self) -> None:
        """Let nobody take over any more; the path is left to a successor that holds it by now. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            server.close()
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()

    async def _serve(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            link, _ = await loop.sock_accept(server)
            with link:
                link.setblocking(False)
                if await self._offer(loop, link):
                    self._taken()
                    return

    async def _offer(self, loop: asyncio.AbstractEventLoop, link: socket.socket) -> bool:
        """Whether this one took over."""
        if not _same_user(link):
            log.warning("handover refused: asked for by another user")
            return False
        try:
            socket.send_fds(link, [b"l"], [self._listener.fileno()])
            async with asyncio.timeout(START_S):
                answer = await loop.sock_recv(link, len(_READY))
        except (OSError, TimeoutError) as error:
            log.warning("handover came to nothing cause=%r", str(error) or type(error).__name__)
            return False
        if answer != _READY:
            log.warning("handover came to nothing cause='the successor ended before it served'")
        return answer == _READY


def _same_user(link: socket.socket) -> bool:
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())
