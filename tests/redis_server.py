"""A real redis-server of a test's own: started, stopped, killed and emptied at will."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from deploy.stack import free_port

START_S = 10.0
REDIS = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(REDIS is None, reason="redis-server is not installed")


class RedisServer:
    """Keeps nothing on disk; ``restart`` begins an empty one at the same address."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options
        self._start()

    def _start(self) -> None:
        assert REDIS is not None
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [REDIS, *fixed, *self._options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
                probe.sendall(b"PING\r\n")
                if probe.recv(64):
                    return
            time.sleep(0.02)
        raise AssertionError("redis-server does not answer")

    def say(self, *words: str) -> bytes:
        """One command over a connection of its own; the first bytes of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as client:
            client.sendall(b"*%d\r\n" % len(words))
            for word in words:
                data = word.encode()
                client.sendall(b"$%d\r\n%s\r\n" % (len(data), data))
            return client.recv(1 << 16)

    def stall(self) -> None:
        """It takes connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It answers again."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone, with all that it held."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Another one, empty, in its place."""
        self._start()

    def close(self) -> None:
        """Idempotent; also for one that is stalled."""
        self.kill()


@contextlib.contextmanager
def running_redis(*options: str) -> Iterator[RedisServer]:
    """Start one and leave nothing behind."""
    server = RedisServer(*options)
    try:
        yield server
    finally:
        server.close()
