"""A machine's report for people: a table of what it has, and a tree of what hangs where."""

from __future__ import annotations

from collections import Counter

from rich.table import Table
from rich.tree import Tree

from kvcache.topology import Gpu, MachineReport, MemoryKind, RdmaPort, Via

_KINDS = {
    MemoryKind.DRAM: "DRAM",
    MemoryKind.CXL: "CXL memory",
    MemoryKind.GPU: "GPU memory",
    MemoryKind.CPULESS: "memory without processors",
}


def rate(bytes_per_s: float) -> str:
    """GB/s as links are named, or that it is not known."""
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s else "rate unknown"


def table(report: MachineReport) -> Table:
    """One row for each kind of thing."""
    shown = Table("what", "found", box=None, pad_edge=False)
    place = report.place
    shown.add_row("host", place.host or "-")
    for name in ("region", "zone", "rack"):
        if getattr(place, name):
            shown.add_row(name, getattr(place, name))
    names = Counter(gpu.name or "GPU" for gpu in report.gpus)
    shown.add_row("GPUs", ", ".join(f"{count} x {name}" for name, count in names.items()) or "none")
    ways = Counter((link.via, link.nvlinks, link.bytes_per_s) for link in report.gpu_links)
    for (via, nvlinks, each), pairs in sorted(ways.items(), key=lambda way: (-way[0][2], way[0][0])):
        word = f"{nvlinks} NVLinks" if via is Via.NVLINK else f"PCIe {via.upper()}"
        shown.add_row("GPU pairs", f"{pairs} by {word}, {rate(each)}")
    for fabric, count in Counter(gpu.fabric for gpu in report.gpus if gpu.fabric).items():
        shown.add_row("NVLink fabric", f"{fabric}, {count} of its GPUs are here")
    ports = Counter((port.layer or "RDMA", port.bytes_per_s) for port in report.rdma if port.active)
    for (layer, each), count in ports.items():
        shown.add_row("RDMA", f"{count} x {layer}, {rate(each)}")
    idle = sum(not port.active for port in report.rdma)
    if idle:
        shown.add_row("RDMA", f"{idle} not active")
    if not report.rdma:
        shown.add_row("RDMA", "none")
    for node in report.memory:
        shown.add_row(f"NUMA {node.numa}", _memory(node.nbytes, node.cpus, node.kind))
    for port in report.net:
        shown.add_row("TCP", f"{port.name}, {rate(port.bytes_per_s)}")
    if not report.net:
        shown.add_row("TCP", "no interface with a device behind it is up; the loopback only")
    for text in report.missing:
        shown.add_row("not found", text)
    return shown


def tree(report: MachineReport) -> Tree:
    """Region, zone, rack and host; below it NUMA nodes with the GPUs and ports near them, then what is near none."""
    place = report.place
    levels = [text for text in (place.region, place.zone, place.rack, place.host) if text] or ["this machine"]
    root = Tree(levels[0])
    host = root
    for text in levels[1:]:
        host = host.add(text)
    known = {node.numa for node in report.memory}
    for node in report.memory:
        branch = host.add(f"NUMA {node.numa}: {_memory(node.nbytes, node.cpus, node.kind)}")
        for gpu in report.gpus:
            if gpu.numa == node.numa:
                branch.add(_gpu(gpu))
        for port in report.rdma:
            if port.numa == node.numa:
                branch.add(_port(port))
    for gpu in report.gpus:
        if gpu.numa not in known:
            host.add(_gpu(gpu))
    for port in report.rdma:
        if port.numa not in known:
            host.add(_port(port))
    for interface in report.net:
        host.add(f"{interface.name}: TCP, {rate(interface.bytes_per_s)}")
    return root


def _memory(nbytes: int, cpus: int, kind: MemoryKind) -> str:
    return f"{nbytes / 2**30:.1f} GiB of {_KINDS[kind]}" + (f", {cpus} processors" if cpus else "")


def _gpu(gpu: Gpu) -> str:
    ways = [f"PCIe {rate(gpu.pcie_bytes_per_s)}"]
    if gpu.nvlink_bytes_per_s:
        ways.insert(0, f"NVLink {rate(gpu.nvlink_bytes_per_s)}")
    return f"GPU {gpu.index}: {gpu.name or '?'}, {', '.join(ways)}"


def _port(port: RdmaPort) -> str:
    word = rate(port.bytes_per_s) if port.active else "not active"
    return f"{port.device} port {port.port}: {port.layer or 'RDMA'}, {word}"
