"""What a host that is to be bound or dialled means: this machine alone, or every address that it has."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether it can only mean this machine: a loopback address, bare or in brackets, or the name localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_every_address(host: str) -> bool:
    """Whether it is 0.0.0.0 or ::, which can be bound and means nothing to whoever would dial it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
