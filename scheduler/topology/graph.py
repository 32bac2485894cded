"""One interconnect graph for a cluster, from what its nodes report.

It is kept as the reports themselves: a pair's ways follow from both ends' devices, so that nothing has to be updated
when a node comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.topology import Gpu, GpuLink, MachineReport, RdmaPort, Via
from scheduler.topology.claims import Refusal, check, contradiction
from scheduler.topology.paths import (
    ASSUMED_NVLINK,
    ASSUMED_PCIE,
    ASSUMED_RDMA,
    ASSUMED_SHM,
    ASSUMED_TCP,
    Endpoint,
    Path,
    Transport,
    path,
)


class Interconnect:
    """The machines of one cluster. Bounded by how many nodes its owner admits."""

    def __init__(self) -> None:
        self._reports: dict[str, MachineReport] = {}

    def tell(self, node_id: str, report: MachineReport) -> Refusal | None:
        """Take a node's report in place of an earlier one; or say what cannot be so, and know nothing of this node."""
        self._reports.pop(node_id, None)
        refusal = check(node_id, report) or contradiction(node_id, report, self._reports)
        if refusal is None:
            self._reports[node_id] = report
        return refusal

    def forget(self, node_id: str) -> None:
        """The node is gone. Nothing happens for one that is not known."""
        self._reports.pop(node_id, None)

    def report(self, node_id: str) -> MachineReport | None:
        """What a node said of its machine; None where it said nothing, or nothing that can be so."""
        return self._reports.get(node_id)

    def paths(self, a: Endpoint, b: Endpoint) -> tuple[Path, ...]:
        """Every way from ``a`` to ``b``. TCP is always among them, for nodes that nothing is known of as well."""
        mine, theirs = self._reports.get(a.node_id), self._reports.get(b.node_id)
        if mine is None or theirs is None:
            who = a.node_id if mine is None else b.node_id
            return (path(Transport.TCP, 0.0, ASSUMED_TCP, f"nothing is known of {who}'s machine"),)
        here, there = _gpu(mine, a), _gpu(theirs, b)
        local = a.node_id == b.node_id or (bool(mine.machine) and mine.machine == theirs.machine)
        tcp = path(Transport.TCP, min(_net(mine), _net(theirs)), ASSUMED_TCP, "")
        if local:
            loopback = Path(Transport.TCP, ASSUMED_SHM / 2, True, "the loopback copies twice")
            return (*_on_one_machine(mine, theirs, here, there), loopback)
        found = []
        if here is not None and there is not None and here.fabric and here.fabric == there.fabric:
            rate = min(here.nvlink_bytes_per_s, there.nvlink_bytes_per_s)
            found.append(path(Transport.NVLINK, rate, ASSUMED_NVLINK, f"one NVLink fabric: {here.fabric}"))
        rdma = _rdma(mine, theirs, here, there)
        if rdma is not None:
            found.append(rdma)
        return (*found, tcp)


def _gpu(report: MachineReport, end: Endpoint) -> Gpu | None:
    """The GPU at an endpoint. Raises ValueError where its node has none of that index."""
    if end.gpu is None:
        return None
    for gpu in report.gpus:
        if gpu.index == end.gpu:
            return gpu
    raise ValueError(f"gpu: {end.node_id} has no GPU {end.gpu}; it has {[gpu.index for gpu in report.gpus]}")


def _on_one_machine(mine: MachineReport, theirs: MachineReport, a: Gpu | None, b: Gpu | None) -> Sequence[Path]:
    shm = path(Transport.SHM, 0.0, ASSUMED_SHM, "one machine's memory")
    if a is None and b is None:
        return (shm,)
    if a is None or b is None:
        gpu = a or b
        assert gpu is not None
        return (path(Transport.PCIE, gpu.pcie_bytes_per_s, ASSUMED_PCIE, "between a GPU and its host"), shm)
    link = _link(mine, theirs, a, b)
    pcie = min(a.pcie_bytes_per_s, b.pcie_bytes_per_s)
    if link is not None and link.via is Via.NVLINK:
        bonded = path(Transport.NVLINK, link.bytes_per_s, ASSUMED_NVLINK, f"{link.nvlinks} NVLinks")
        return (bonded, path(Transport.PCIE, pcie, ASSUMED_PCIE, "beside NVLink"), shm)
    why = "no NVLink between them" + (f", PCIe {link.via.upper()}" if link is not None else "")
    return (path(Transport.PCIE, pcie, ASSUMED_PCIE, why), shm)


def _link(mine: MachineReport, theirs: MachineReport, a: Gpu, b: Gpu) -> GpuLink | None:
    """The link between two GPUs of one machine. Nodes in containers may number them differently: UUIDs decide."""
    for report in (mine, theirs):
        at = {gpu.index: gpu.uuid or str(gpu.index) for gpu in report.gpus}
        wanted = {a.uuid or str(a.index), b.uuid or str(b.index)}
        for link in report.gpu_links:
            if {at[link.a], at[link.b]} == wanted:
                return link
    return None


def _rdma(mine: MachineReport, theirs: MachineReport, a: Gpu | None, b: Gpu | None) -> Path | None:
    """Between two machines with active ports of one kind in one subnet: the fastest pair, one port at each end."""
    here, there = _best_ports(mine.rdma, a), _best_ports(theirs.rdma, b)
    shared = [(here[net], there[net]) for net in here if net in there]
    if not shared:
        return None
    one, other = max(shared, key=lambda pair: min(pair[0].bytes_per_s, pair[1].bytes_per_s))
    rate = min(one.bytes_per_s, other.bytes_per_s)
    return path(Transport.RDMA, rate, ASSUMED_RDMA, f"{one.layer or 'RDMA'} {one.device} to {other.device}")


def _best_ports(ports: Sequence[RdmaPort], gpu: Gpu | None) -> dict[tuple[str, str], RdmaPort]:
    """For each kind and subnet the fastest active port; among equals one at the GPU's NUMA node."""
    best: dict[tuple[str, str], tuple[tuple[float, bool], RdmaPort]] = {}
    for port in ports:
        near = gpu is not None and gpu.numa is not None and port.numa == gpu.numa
        worth = (port.bytes_per_s, near)
        net = (port.layer, port.subnet)
        if port.active and (net not in best or worth > best[net][0]):
            best[net] = worth, port
    return {net: port for net, (_, port) in best.items()}


def _net(report: MachineReport) -> float:
    return max((port.bytes_per_s for port in report.net), default=0.0)
