"""UCX's settings for a route, as environment variables by name: which of its transports, and which devices."""

from __future__ import annotations

from collections.abc import Mapping

from kvcache.topology import MachineReport

RDMA = "rdma"


def ucx_settings(report: MachineReport) -> Mapping[str, str] | None:
    """For RDMA over the active ports of this machine; None where it has none.

    TCP is left among the transports because UCX makes its connections by it where the ports are of different kinds.
    """
    ports = [f"{port.device}:{port.port}" for port in report.rdma if port.active]
    if not ports:
        return None
    interfaces = [port.name for port in report.net]
    return {"UCX_TLS": "rc,ud,tcp", "UCX_NET_DEVICES": ",".join((*ports, *interfaces))}


OVER_TCP: Mapping[str, str] = {"UCX_TLS": "tcp"}
"""Without any RDMA hardware: for measurements, as sockets do the same with less."""
