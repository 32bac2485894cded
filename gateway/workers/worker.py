"""One worker: its listeners on the shared port and on its own, its state file, and its line to the others."""

from __future__ import annotations

import errno
import socket
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from gateway.config import ConfigError, GatewayConfig


@dataclass(frozen=True, slots=True)
class Worker:
    """Number ``number`` of ``count``, from 0. ``port`` is shared by all.

    Nodes reach this one at ``port`` + 1 + number, or where ``any_port`` at whatever was free. ``directory`` holds a
    socket of each, by which they ask each other for their metrics.
    """

    number: int
    count: int
    port: int
    any_port: bool
    directory: Path

    def socket_of(self, number: int) -> Path:
        """Where a worker tells its metrics."""
        return self.directory / f"{number}.sock"

    def listeners(self, host: str) -> tuple[socket.socket, socket.socket]:
        """The shared one and its own, both listening. Raises ConfigError where a port cannot be had."""
        shared = listen(host, self.port, shared=True)
        try:
            return shared, listen(host, 0 if self.any_port else self.port + 1 + self.number, shared=False)
        except BaseException:
            shared.close()
            raise

    def config(self, config: GatewayConfig) -> GatewayConfig:
        """As this worker has it: with a state file of its own."""
        file = config.state_file
        return config if file is None else replace(config, state_file=state_of(file, self.number))

    def url(self, config: GatewayConfig, own_port: int) -> str:
        """Where nodes reach this worker and no other. Raises ConfigError where nobody could know."""
        if config.advertise is None:
            return config.url(own_port)
        parts = urlsplit(config.advertise)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return urlunsplit(parts._replace(netloc=f"{host}:{own_port}"))


def state_of(file: Path, number: int) -> Path:
    """The state file of a worker: the first has the one that was named."""
    return file.with_name(f"{file.name}.{number}") if number else file


def first_state(config: GatewayConfig, count: int) -> None:
    """Give each worker that has no state file yet a copy of the first one's. Raises ConfigError."""
    file = config.state_file
    if file is None or not file.exists():
        return
    for number in range(1, count):
        copy = state_of(file, number)
        if copy.exists():
            continue
        try:
            copy.touch(0o600)
            source, target = sqlite3.connect(file), sqlite3.connect(copy)
            try:
                source.backup(target)
            finally:
                source.close()
                target.close()
        except (OSError, sqlite3.DatabaseError) as error:
            copy.unlink(missing_ok=True)
            raise ConfigError(f"--state {file}: cannot be copied for worker {number}: {error}") from error


def listen(host: str, port: int, shared: bool, backlog: int = 2048) -> socket.socket:
    """A listening socket; ``shared``: other processes of this user may listen there, too. Raises ConfigError."""
    found = reserve(host, port, shared)
    found.listen(backlog)
    return found


def reserve(host: str, port: int, shared: bool) -> socket.socket:
    """A bound socket that does not listen: it keeps the port, and gets no connection. Raises ConfigError."""
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            found.bind((host, port))
        except OSError as error:
            if not shared or error.errno != errno.EADDRINUSE:
                raise
            # Connections of a gateway alone may linger there. Not set at once: others could then bind beside this one.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error}") from error
    return found
