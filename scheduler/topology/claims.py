"""Whether what a node says of its machine can be so, by itself and beside what others say.

A node whose report is refused still serves: it is reached by TCP, as one that reports nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvcache.topology import MachineReport, Via

MAX_GPUS = 128
MAX_LINKS = MAX_GPUS * (MAX_GPUS - 1) // 2
MAX_PORTS = 256
MAX_MEMORY = 1024
MAX_MISSING = 32
MAX_CHARS = 128

MAX_NVLINK = 4e12
"""Bytes per second in one direction; NVLink 5 does 0.9e12, twice that is announced."""
MAX_PCIE = 300e9
"""Generation 7 with 16 lanes does 242e9."""
MAX_NETWORK = 400e9
"""One port; XDR InfiniBand and 1.6 Tb/s Ethernet do 200e9."""
_ROUNDING = 1.02


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which field of whose report cannot be so, and why."""

    node_id: str
    field: str
    reason: str


def check(node_id: str, report: MachineReport) -> Refusal | None:
    """The first thing in a report that cannot be so by itself: a bound, a name, a rate, an unknown peer, a doublet."""
    found = next(_wrong(report), None)
    return None if found is None else Refusal(node_id, *found)


def contradiction(node_id: str, report: MachineReport, others: Mapping[str, MachineReport]) -> Refusal | None:
    """The first thing in a report that another node's report does not allow."""
    found = next((c for other, theirs in others.items() for c in _differ(report, other, theirs)), None)
    return None if found is None else Refusal(node_id, *found)


Wrong = tuple[str, str]


def _wrong(report: MachineReport) -> Iterator[Wrong]:
    yield from _too_many(report)
    yield from _bad_texts(report)
    yield from _bad_gpus(report)
    yield from _bad_links(report)
    yield from _doublets("rdma", ((port.device, port.port) for port in report.rdma))
    for port in report.rdma:
        yield from _bad_rate(f"rdma {port.device}", port.bytes_per_s, MAX_NETWORK)
    yield from _doublets("net", (port.name for port in report.net))
    for interface in report.net:
        yield from _bad_rate(f"net {interface.name}", interface.bytes_per_s, MAX_NETWORK)
    yield from _doublets("memory", (node.numa for node in report.memory))
    for node in report.memory:
        if node.nbytes < 0 or node.cpus < 0:
            yield f"memory {node.numa}", "sizes must not be negative"


def _too_many(report: MachineReport) -> Iterator[Wrong]:
    bounds = {
        "gpus": MAX_GPUS,
        "gpu_links": MAX_LINKS,
        "rdma": MAX_PORTS,
        "net": MAX_PORTS,
        "memory": MAX_MEMORY,
        "missing": MAX_MISSING,
    }
    for field, most in bounds.items():
        if len(getattr(report, field)) > most:
            yield field, f"{len(getattr(report, field))} are more than {most}"


def _bad_texts(report: MachineReport) -> Iterator[Wrong]:
    place = report.place
    texts = [
        ("machine", report.machine),
        *(("place", text) for text in (place.region, place.zone, place.rack, place.host)),
        *(("gpus", text) for gpu in report.gpus for text in (gpu.name, gpu.uuid, gpu.fabric)),
        *(("rdma", text) for port in report.rdma for text in (port.device, port.layer, port.subnet)),
        *(("net", port.name) for port in report.net),
        *(("missing", text) for text in report.missing),
    ]
    for field, text in texts:
        if len(text) > MAX_CHARS or not (text.isprintable() or not text):
            yield field, f"texts must be printable and no longer than {MAX_CHARS}"


def _bad_gpus(report: MachineReport) -> Iterator[Wrong]:
    yield from _doublets("gpus", (gpu.index for gpu in report.gpus))
    yield from _doublets("gpus", (gpu.uuid for gpu in report.gpus if gpu.uuid))
    for gpu in report.gpus:
        yield from _bad_rate(f"gpu {gpu.index} pcie", gpu.pcie_bytes_per_s, MAX_PCIE)
        yield from _bad_rate(f"gpu {gpu.index} nvlink", gpu.nvlink_bytes_per_s, MAX_NVLINK)


def _bad_links(report: MachineReport) -> Iterator[Wrong]:
    gpus = {gpu.index: gpu for gpu in report.gpus}
    yield from _doublets("gpu_links", ((min(link.a, link.b), max(link.a, link.b)) for link in report.gpu_links))
    for link in report.gpu_links:
        name = f"link {link.a}-{link.b}"
        for end in (link.a, link.b):
            if end not in gpus:
                yield name, f"unknown peer: no GPU {end} is in the report"
                return
        if link.a == link.b:
            yield name, "a GPU has no link to itself"
        yield from _bad_rate(name, link.bytes_per_s, MAX_NVLINK if link.via is Via.NVLINK else MAX_PCIE)
        if (link.via is Via.NVLINK) != (link.nvlinks > 0):
            yield name, f"{link.nvlinks} NVLinks contradict via {link.via}"
        for end in (link.a, link.b):
            total = gpus[end].nvlink_bytes_per_s
            if link.via is Via.NVLINK and total and link.bytes_per_s > total * _ROUNDING:
                yield name, f"{link.bytes_per_s:.4g} B/s contradict the {total:.4g} B/s of all NVLinks of GPU {end}"


def _bad_rate(name: str, rate: float, most: float) -> Iterator[Wrong]:
    if not math.isfinite(rate) or not 0 <= rate <= most:
        yield name, f"impossible rate: {rate:.4g} B/s is outside [0, {most:.4g}]"


def _doublets(field: str, names: Iterable[object]) -> Iterator[Wrong]:
    seen = set()
    for name in names:
        if name in seen:
            yield field, f"{name} is there twice"
        seen.add(name)


def _differ(mine: MachineReport, other: str, theirs: MachineReport) -> Iterator[Wrong]:
    same_machine = bool(mine.machine) and mine.machine == theirs.machine
    if same_machine:
        for field in ("region", "zone", "rack", "host"):
            here, there = getattr(mine.place, field), getattr(theirs.place, field)
            # containers of one machine have hostnames of their own
            if field != "host" and here and there and here != there:
                yield f"place.{field}", f"{here!r}, but {other!r} on the same machine says {there!r}"
        rates = {(port.device, port.port): port.bytes_per_s for port in theirs.rdma if port.active}
        for port in mine.rdma:
            known = rates.get((port.device, port.port))
            if port.active and port.bytes_per_s and known and known != port.bytes_per_s:
                yield f"rdma {port.device}", f"{port.bytes_per_s:.4g} B/s, but {other!r} says {known:.4g} B/s"
    known_gpus = {gpu.uuid: gpu for gpu in theirs.gpus if gpu.uuid}
    for gpu in mine.gpus:
        known_gpu = known_gpus.get(gpu.uuid)
        if known_gpu is None:
            continue
        if not same_machine:
            yield f"gpu {gpu.index}", f"{other!r} on another machine has it, too: {gpu.uuid}"
        elif gpu.fabric and known_gpu.fabric and gpu.fabric != known_gpu.fabric:
            yield f"gpu {gpu.index} fabric", f"{gpu.fabric}, but {other!r} says {known_gpu.fabric}"
