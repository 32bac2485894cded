"""NUMA nodes and what their memory is. A CXL memory expander in system-RAM mode is a NUMA node without processors."""

from __future__ import annotations

import re

from kvcache.topology import MemoryKind, MemoryNode
from node.topology.machine import Machine

NODES = "/sys/devices/system/node"
CXL_DEVICES = "/sys/bus/cxl/devices"
_TOTAL = re.compile(r"MemTotal:\s*(\d+) kB")


def find_memory(machine: Machine, gpu_memory: frozenset[int] = frozenset()) -> tuple[MemoryNode, ...]:
    """Every NUMA node with memory. ``gpu_memory`` are those that GPUs say is theirs: they have no processors, too."""
    cxl = any(re.fullmatch(r"(mem|region)\d+", name) for name in machine.names(CXL_DEVICES))
    found = []
    for name in machine.names(NODES):
        number = re.fullmatch(r"node(\d+)", name)
        total = _TOTAL.search(machine.read(f"{NODES}/{name}/meminfo") or "")
        if number is None or total is None or total[1] == "0":
            continue
        numa, cpus = int(number[1]), count_cpus(machine.read(f"{NODES}/{name}/cpulist") or "")
        kind = MemoryKind.DRAM
        if not cpus:
            kind = MemoryKind.GPU if numa in gpu_memory else MemoryKind.CXL if cxl else MemoryKind.CPULESS
        found.append(MemoryNode(numa, int(total[1]) << 10, cpus, kind))
    return tuple(sorted(found, key=lambda node: node.numa))


def count_cpus(text: str) -> int:
    """How many processors a list like 0-3,8 names."""
    count = 0
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            count += int(last or first) - int(first) + 1
    return count
