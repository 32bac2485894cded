"""Network namespaces without names: they end with the last process or descriptor that holds them, even after a kill."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator

DEVICE = "wan0"
TUN = "/dev/net/tun"

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_RING_PACKETS = 4000
_libc = ctypes.CDLL(None, use_errno=True)


class WanUnavailable(Exception):
    """This machine forbids or lacks what the link needs; the text says what."""


def own_namespace() -> int:
    """A descriptor of the namespace that the calling thread is in."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def fresh_namespace() -> int:
    """A descriptor of a new namespace, whose loopback is up. Raises WanUnavailable where that is not permitted."""
    if shutil.which("ip") is None:
        raise WanUnavailable("ip is not installed (Debian: iproute2)")
    home = own_namespace()
    try:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            raise WanUnavailable(f"no network namespaces here: {os.strerror(ctypes.get_errno())}")
        try:
            _ip("link", "set", "lo", "up")
            return own_namespace()
        finally:
            _set(home)
    finally:
        os.close(home)


@contextlib.contextmanager
def entered(namespace: int) -> Iterator[None]:
    """The calling thread, and what it starts meanwhile, is in ``namespace``. Its sockets stay there afterwards."""
    home = own_namespace()
    try:
        _set(namespace)
        try:
            yield
        finally:
            _set(home)
    finally:
        os.close(home)


def open_tun(namespace: int, address: str, mtu: int) -> int:
    """A TUN device in ``namespace``, up, with this address of a /24. Closing the descriptor removes it.

    Raises WanUnavailable.
    """
    with entered(namespace):
        try:
            tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise WanUnavailable(f"{TUN} cannot be opened: {error.strerror}") from error
        try:
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
            _ip("link", "set", "dev", DEVICE, "addrgenmode", "none")
            _ip("address", "add", f"{address}/24", "dev", DEVICE)
            _ip("link", "set", "dev", DEVICE, "mtu", str(mtu), "txqueuelen", str(_RING_PACKETS), "up")
        except (OSError, WanUnavailable) as error:
            os.close(tun)
            raise WanUnavailable(f"no TUN device here: {error}") from error
    return tun


def _set(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise WanUnavailable(f"ip {' '.join(words)}: {done.stderr.strip()}")
