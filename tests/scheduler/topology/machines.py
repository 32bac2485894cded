"""Small machines for the graph."""

from __future__ import annotations

from kvcache.topology import Gpu, GpuLink, MachineReport, NetPort, Place, RdmaPort, Via

NVLINK, PCIE, RDMA, TCP = 478e9, 63e9, 50e9, 3.125e9


def machine(
    name: str,
    gpus: int = 2,
    nvlink: bool = True,
    rdma: str = "InfiniBand",
    fabric: str = "",
    rack: str = "",
    net: float = TCP,
) -> MachineReport:
    """GPUs joined by NVLink or PCIe, one RDMA port of a kind ("" for none), one interface."""
    via, nvlinks, rate = (Via.NVLINK, 18, NVLINK) if nvlink else (Via.SYS, 0, PCIE)
    return MachineReport(
        machine=name,
        place=Place(host=name, rack=rack),
        gpus=tuple(Gpu(i, "H100", f"{name}-{i}", i % 2, PCIE, NVLINK if nvlink else 0.0, fabric) for i in range(gpus)),
        gpu_links=tuple(GpuLink(a, b, via, nvlinks, rate) for a in range(gpus) for b in range(a + 1, gpus)),
        rdma=(RdmaPort("mlx5_0", 1, True, RDMA, rdma, "fe80:0000:0000:0000", 0),) if rdma else (),
        net=(NetPort("eth0", net),),
    )
