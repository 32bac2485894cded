"""GPUs and their links, from what nvidia-smi prints.

``topo -m`` is the matrix of who reaches whom how, ``nvlink -s`` the rate of every active link in one direction, and the
Fabric section of ``-q`` names the NVLink domain that spans machines (GB200 NVL72 and its kin).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcache.topology import Gpu, GpuLink, Via
from node.topology.machine import Machine
from node.topology.pcie import pci_address, pcie_bytes_per_s

QUERY = ("nvidia-smi", "--query-gpu=index,name,uuid,pci.bus_id", "--format=csv,noheader")
NVLINK_BYTES_PER_S = 25e9
"""One NVLink of generation 2 to 4 in one direction, where its rate is not printed."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NVLINKS = re.compile(r"NV(\d+)")
_GPU = re.compile(r"GPU ?(\d+)")
_LINK = re.compile(r"Link \d+: (\d+(?:\.\d+)?) GB/s")
_VIA = {via.value.upper(): via for via in Via if via is not Via.NVLINK}


@dataclass(frozen=True, slots=True)
class Matrix:
    """The cells of ``topo -m`` between GPUs, each pair once, and what the columns after them say of each GPU."""

    links: tuple[tuple[int, int, str], ...]
    numa: Mapping[int, int] = field(default_factory=dict)
    memory_numa: Mapping[int, int] = field(default_factory=dict)
    """The NUMA node that a GPU's own memory is, on machines where it is one."""


def parse_matrix(text: str) -> Matrix:
    """Read ``nvidia-smi topo -m``. Columns are told apart by position: those of the GPUs come first, then NICs.

    Raises ValueError where there is no matrix.
    """
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    header = next((at for at, line in enumerate(lines) if line.split()[:1] == ["GPU0"] and "Affinity" in line), None)
    if header is None:
        raise ValueError("topo -m: no line of GPU names")
    columns = re.split(r"\s{2,}|\t+", lines[header].strip())
    devices = [name for name in columns if "Affinity" not in name and "NUMA ID" not in name]
    gpus = [int(found[1]) for name in devices if (found := _GPU.fullmatch(name))]
    cells: dict[tuple[int, int], str] = {}
    numa: dict[int, int] = {}
    memory: dict[int, int] = {}
    for line in lines[header + 1 :]:
        words = line.split()
        row = _GPU.fullmatch(words[0]) if words else None
        if row is None or len(words) <= len(devices):
            continue
        for column, cell in zip(gpus, words[1:], strict=False):
            cells[int(row[1]), column] = cell
        # CPU affinity, NUMA affinity and, with newer drivers, the NUMA node of the GPU's memory
        rest = words[1 + len(devices) :]
        if len(rest) > 1 and rest[1].isdecimal():
            numa[int(row[1])] = int(rest[1])
        if len(rest) > 2 and rest[2].isdecimal():
            memory[int(row[1])] = int(rest[2])
    pairs = tuple((a, b, cell) for (a, b), cell in sorted(cells.items()) if a < b)
    return Matrix(pairs, numa, memory)


def parse_rates(text: str) -> dict[int, tuple[float, ...]]:
    """Read ``nvidia-smi nvlink -s``: by GPU, bytes per second of each active link. Inactive links print no rate."""
    rates: dict[int, list[float]] = {}
    current: list[float] | None = None
    for line in text.splitlines():
        if found := _GPU.match(line.strip()):
            current = rates.setdefault(int(found[1]), [])
        elif current is not None and (rate := _LINK.search(line)):
            current.append(float(rate[1]) * 1e9)
    return {gpu: tuple(found) for gpu, found in rates.items()}


def parse_fabrics(text: str) -> list[str]:
    """Read ``nvidia-smi -q``: for each GPU in order its domain across machines, "" where it is in none.

    A domain is a cluster of NVSwitches and a clique in it. Machines whose NVSwitches are their own say N/A or zeros.
    """
    fabrics: list[str] = []
    clique = ""
    for line in text.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "CliqueId":
            clique = value
        elif name == "ClusterUUID":
            real = re.fullmatch(r"[0-9a-fA-F-]{36}", value) and value.strip("0-")
            fabrics.append(f"{value.lower()}.{clique}" if real and clique.isdecimal() else "")
    return fabrics


@dataclass(frozen=True, slots=True)
class Gpus:
    """What was found; ``missing`` says what was not, and why."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[GpuLink, ...] = ()
    memory_numa: frozenset[int] = frozenset()
    missing: tuple[str, ...] = ()


def find_gpus(machine: Machine) -> Gpus:
    """Ask nvidia-smi, and sysfs for each GPU's PCIe link and NUMA node."""
    listed = machine.run(*QUERY)
    if not listed or not listed.strip():
        return Gpus(missing=("gpu: nvidia-smi lists none",))
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.strip().splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[0].isdecimal()]
    missing: list[str] = []
    matrix = Matrix(())
    try:
        matrix = parse_matrix(machine.run("nvidia-smi", "topo", "-m") or "")
    except ValueError as error:
        missing.append(f"gpu links: {error}")
    rates = parse_rates(machine.run("nvidia-smi", "nvlink", "-s") or "")
    fabrics = parse_fabrics(machine.run("nvidia-smi", "-q") or "")
    if len(fabrics) != len(rows):
        fabrics = [""] * len(rows)
        missing.append("nvlink fabric: nvidia-smi -q names none")
    gpus = tuple(
        Gpu(
            index=int(index),
            name=name,
            uuid=uuid,
            numa=matrix.numa.get(int(index), _numa(machine, bus)),
            pcie_bytes_per_s=pcie_bytes_per_s(machine, bus),
            nvlink_bytes_per_s=sum(rates.get(int(index), ())),
            fabric=fabric,
        )
        for (index, name, uuid, bus), fabric in zip(rows, fabrics, strict=True)
    )
    links = _links(matrix, rates, gpus)
    return Gpus(gpus, links, frozenset(matrix.memory_numa.values()), tuple(missing))


def _links(matrix: Matrix, rates: Mapping[int, tuple[float, ...]], gpus: tuple[Gpu, ...]) -> tuple[GpuLink, ...]:
    """Cells as links; those that say nothing of a way (``DIS``, ``N/A``) are left out."""
    pcie = {gpu.index: gpu.pcie_bytes_per_s for gpu in gpus}
    found = []
    for a, b, cell in matrix.links:
        if a not in pcie or b not in pcie:
            continue
        if nvlinks := _NVLINKS.fullmatch(cell):
            count = int(nvlinks[1])
            each = min((min(rates[gpu]) for gpu in (a, b) if rates.get(gpu)), default=NVLINK_BYTES_PER_S)
            found.append(GpuLink(a, b, Via.NVLINK, count, count * each))
        elif cell in _VIA:
            found.append(GpuLink(a, b, _VIA[cell], 0, min(pcie[a], pcie[b])))
    return tuple(found)


def _numa(machine: Machine, bus: str) -> int | None:
    text = machine.read(f"/sys/bus/pci/devices/{pci_address(bus)}/numa_node")
    return int(text) if text is not None and text.isdecimal() else None  # -1: the firmware did not say
