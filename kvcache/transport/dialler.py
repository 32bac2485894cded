"""Reaching an address: one attempt, and the pauses between attempts."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import socket

from kvcache.control import KvAddress
from kvcache.session import PeerRefused
from kvcache.transport.interface import TransportLimits
from kvcache.transport.shaping import tune


class Backoff:
    """The pause before the next attempt at one peer. It outlives the callers, so that many of them make no storm."""

    def __init__(self, first_s: float, most_s: float, jitter: random.Random) -> None:
        self.cause = "no answer"
        """Why the last attempt failed."""
        self._first_s = first_s
        self._most_s = most_s
        self._jitter = jitter
        self._failures = 0
        self._not_before = 0.0

    def failed(self, now: float, cause: str) -> None:
        """The next attempt waits between half and all of a span that doubles with each failure, up to ``most_s``."""
        self.cause = cause
        span = min(self._most_s, self._first_s * 2.0**self._failures)
        self._failures = min(self._failures + 1, 30)
        self._not_before = now + span * self._jitter.uniform(0.5, 1.0)

    def remaining(self, now: float) -> float:
        """Seconds until the next attempt may start."""
        return max(0.0, self._not_before - now)


async def connect(address: KvAddress, anywhere: bool, limits: TransportLimits) -> socket.socket:
    """A connected socket; the host's addresses are tried in turn, each for ``connect_s``.

    Raises OSError; PeerRefused (field ``tls``) for an address off the loopback, unless ``anywhere`` may be dialled.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failure = OSError(f"{address.host} has no address")
    for family, kind, protocol, _, target in found:
        if not anywhere and not ipaddress.ip_address(target[0]).is_loopback:
            raise PeerRefused("tls", f"{address.host} is not the loopback: give a CA (TLS) to dial it")
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            tune(sock, limits.socket_buffer, limits.unsent_in_kernel)
            async with asyncio.timeout(limits.connect_s):
                await loop.sock_connect(sock, target)
            return sock
        except TimeoutError:
            sock.close()
            failure = TimeoutError(f"no answer within {limits.connect_s} s: {address.host}:{address.port}")
        except OSError as error:
            sock.close()
            reason = os.strerror(error.errno) if error.errno is not None else str(error)
            failure = ConnectionError(f"{reason}: {address.host}:{address.port}")
        except BaseException:
            sock.close()
            raise
    raise failure
