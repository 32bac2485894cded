"""What a node says of the machine that it runs on: devices, the links between them, and where it stands.

Every part may be missing. Rates are bytes per second in one direction, 0 where they are not known.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_REPORT_BYTES = 1 << 20


class Via(StrEnum):
    """How two GPUs of one machine reach each other, in the words of ``nvidia-smi topo -m``.

    ``NVLINK``: directly or through NVSwitch. ``PIX``: one PCIe bridge; ``PXB``: several; ``PHB``: a host bridge;
    ``NODE``: host bridges of one NUMA node; ``SYS``: between NUMA nodes.
    """

    NVLINK = "nvlink"
    PIX = "pix"
    PXB = "pxb"
    PHB = "phb"
    NODE = "node"
    SYS = "sys"


class MemoryKind(StrEnum):
    """What a NUMA node's memory is. ``CPULESS`` has no processors, and nothing says that it is CXL."""

    DRAM = "dram"
    CXL = "cxl"
    GPU = "gpu"
    CPULESS = "cpuless"


class Place(msgspec.Struct, frozen=True):
    """Where a machine stands; "" where nobody said."""

    region: str = ""
    zone: str = ""
    rack: str = ""
    host: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. ``fabric`` names the NVLink domain that spans machines, "" where there is none.

    ``nvlink_bytes_per_s`` is the sum of its active links.
    """

    index: int
    name: str = ""
    uuid: str = ""
    numa: int | None = None
    pcie_bytes_per_s: float = 0.0
    nvlink_bytes_per_s: float = 0.0
    fabric: str = ""


class GpuLink(msgspec.Struct, frozen=True):
    """Between the GPUs of two indexes; ``nvlinks`` is how many NVLinks are bonded, 0 for the other kinds."""

    a: int
    b: int
    via: Via
    nvlinks: int = 0
    bytes_per_s: float = 0.0


class RdmaPort(msgspec.Struct, frozen=True):
    """One port of an RDMA device. ``subnet`` is the prefix of its first GID; ``layer`` InfiniBand or Ethernet."""

    device: str
    port: int
    active: bool
    bytes_per_s: float = 0.0
    layer: str = ""
    subnet: str = ""
    numa: int | None = None


class MemoryNode(msgspec.Struct, frozen=True):
    """One NUMA node with memory, and how many processors it has."""

    numa: int
    nbytes: int
    cpus: int
    kind: MemoryKind = MemoryKind.DRAM


class NetPort(msgspec.Struct, frozen=True):
    """One network interface that is up."""

    name: str
    bytes_per_s: float = 0.0


class MachineReport(msgspec.Struct, frozen=True):
    """One machine as a node on it sees it.

    ``machine`` is the same for all nodes of one running machine and no other: its kernel's boot id. ``missing`` says
    what could not be found out, and why.
    """

    machine: str = ""
    place: Place = Place()
    gpus: tuple[Gpu, ...] = ()
    gpu_links: tuple[GpuLink, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    memory: tuple[MemoryNode, ...] = ()
    net: tuple[NetPort, ...] = ()
    missing: tuple[str, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[MachineReport] = msgspec.msgpack.Decoder(MachineReport)


def encode_report(report: MachineReport) -> bytes:
    """A report as a Join carries it."""
    return _encoder.encode(report)


def decode_report(data: bytes) -> MachineReport:
    """Read what a node sent; fields of a neighbouring version are ignored. Raises ValueError."""
    if len(data) > MAX_REPORT_BYTES:
        raise ValueError(f"{len(data)} bytes are more than {MAX_REPORT_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
