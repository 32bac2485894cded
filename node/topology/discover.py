"""Everything that a machine tells of itself, in one report. Whatever cannot be found is named, and does no harm."""

from __future__ import annotations

from collections.abc import Mapping

from kvcache.topology import MachineReport
from node.topology.machine import Machine
from node.topology.network import find_net, find_rdma
from node.topology.numa import find_memory
from node.topology.nvidia import find_gpus
from node.topology.place import place

BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""The same in all containers of a running machine, whatever they are named, and new with every start of it."""


def discover(machine: Machine, said: Mapping[str, str]) -> MachineReport:
    """Look at a machine; ``said`` is where it stands (``node.topology.place``)."""
    gpus = find_gpus(machine)
    rdma, net = find_rdma(machine), find_net(machine)
    memory = find_memory(machine, gpus.memory_numa)
    missing = list(gpus.missing)
    if not rdma:
        missing.append("rdma: no device in /sys/class/infiniband")
    if not memory:
        missing.append("numa: nothing in /sys/devices/system/node")
    if not any(port.bytes_per_s for port in net):
        missing.append("tcp: no interface says how fast it is")
    return MachineReport(
        machine=machine.read(BOOT_ID) or "",
        place=place(machine, said),
        gpus=gpus.gpus,
        gpu_links=gpus.links,
        rdma=rdma,
        memory=memory,
        net=net,
        missing=tuple(missing),
    )
