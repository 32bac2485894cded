"""RDMA ports and network interfaces, from sysfs."""

from __future__ import annotations

import re

from kvcache.topology import NetPort, RdmaPort
from node.topology.machine import Machine

RDMA = "/sys/class/infiniband"
NET = "/sys/class/net"
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_BYTES_PER_GBIT = 1e9 / 8
_BYTES_PER_MBIT = 1e6 / 8


def find_rdma(machine: Machine) -> tuple[RdmaPort, ...]:
    """Every port of every RDMA device, InfiniBand or RoCE; ``active`` where its state is ACTIVE."""
    found = []
    for device in machine.names(RDMA):
        numa = machine.read(f"{RDMA}/{device}/device/numa_node") or ""
        for port in machine.names(f"{RDMA}/{device}/ports"):
            folder = f"{RDMA}/{device}/ports/{port}"
            rate = _RATE.match(machine.read(f"{folder}/rate") or "")
            gid = machine.read(f"{folder}/gids/0") or ""
            found.append(
                RdmaPort(
                    device=device,
                    port=int(port) if port.isdecimal() else 0,
                    active=(machine.read(f"{folder}/state") or "").endswith("ACTIVE"),
                    bytes_per_s=float(rate[1]) * _BYTES_PER_GBIT if rate else 0.0,
                    layer=machine.read(f"{folder}/link_layer") or "",
                    subnet=gid[:19] if gid.strip("0:") else "",
                    numa=int(numa) if numa.isdecimal() else None,
                )
            )
    return tuple(found)


def find_net(machine: Machine) -> tuple[NetPort, ...]:
    """Interfaces that are up and have a device behind them. Virtual machines often do not say how fast theirs is."""
    found = []
    for name in machine.names(NET):
        if not machine.names(f"{NET}/{name}/device") or machine.read(f"{NET}/{name}/operstate") != "up":
            continue
        speed = machine.read(f"{NET}/{name}/speed") or ""
        found.append(NetPort(name, int(speed) * _BYTES_PER_MBIT if speed.isdecimal() else 0.0))
    return tuple(found)
