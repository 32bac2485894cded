"""What carries bytes between two places of a cluster, how fast, and how long it takes to begin.

Rates are those of the devices where a report has them. What is assumed where it has none is said here, and every path
says so; measured transfers correct either (``scheduler.topology.routes``).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

ASSUMED_SHM = 10e9
"""One core that copies within DRAM."""
ASSUMED_TCP = 1.25e9
"""10 Gb/s: what is common where nothing says how fast an interface is."""
ASSUMED_PCIE = 16e9
"""Generation 3 with 16 lanes."""
ASSUMED_RDMA = 12.5e9
"""100 Gb/s."""
ASSUMED_NVLINK = 50e9
"""Two links of generation 2: the least that any pair has."""


class Transport(StrEnum):
    """A kind of way."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"


SETUP_S = {
    Transport.NVLINK: 10e-6,
    Transport.PCIE: 20e-6,
    Transport.SHM: 10e-6,
    Transport.RDMA: 20e-6,
    Transport.TCP: 200e-6,
}
"""Seconds before the first byte moves: orders of magnitude, not measured here."""


class Endpoint(msgspec.Struct, frozen=True):
    """One end of a transfer: a node's host memory, or the memory of one of its machine's GPUs."""

    node_id: str
    gpu: int | None = None


class Path(msgspec.Struct, frozen=True):
    """One way between two endpoints. ``assumed``: no device said the rate."""

    transport: Transport
    bytes_per_s: float
    assumed: bool
    why: str

    def seconds(self, nbytes: int) -> float:
        """Of a transfer that has it for itself."""
        return SETUP_S[self.transport] + nbytes / self.bytes_per_s


def path(transport: Transport, known: float, assumed: float, why: str) -> Path:
    """A way at its known rate, or at what is assumed where that is 0."""
    return Path(transport, known or assumed, not known, why)
